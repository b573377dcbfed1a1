"""Makes another version of <infiniband/verbs.h> of the installed one, with what rdma-core changes when it grows, or had not yet.

derive_header.py newer|older INSTALLED OUTPUT. Fails when the installed header has not the shape it knows.
"""

import re
import sys


def replaced(text, pattern, replacement):
    changed, count = re.subn(pattern, replacement, text, flags=re.DOTALL)
    if count != 1:
        sys.exit(f"derive_header.py: {count} times, and not once, there is: {pattern}")
    return changed


def with_fields_at_end(text, structure, fields):
    return replaced(text, r"(\nstruct " + structure + r" \{\n.*?)(\n\};)", lambda found: found[1] + "\n" + fields + found[2])


def newer(text):
    # New operations stand in front of the others, many of them, so that an operation taken for its neighbour is noticed.
    text = replaced(
        text, r"(struct verbs_context \{\n[^\n]*new fields go here \*/\n)",
        lambda found: found[1] + "\tint (*newest_op)(struct ibv_context *context, uint64_t argument);\n" + "".join(
            f"\tvoid *(*newer_op_{i})(struct ibv_context *context, void *argument);\n" for i in range(9)))
    text = with_fields_at_end(text, "ibv_port_attr", "\tuint32_t newer_speed;\n\tuint64_t newer[5];")
    text = with_fields_at_end(text, "ibv_device_attr_ex", "\tuint64_t newer_caps[7];")
    text = with_fields_at_end(text, "ibv_qp_init_attr_ex", "\tvoid *newer_object;")
    text = with_fields_at_end(text, "ibv_cq_init_attr_ex", "\tvoid *newer_object;")
    text = with_fields_at_end(text, "ibv_qp_ex", "\tvoid (*wr_newer)(struct ibv_qp_ex *qp);")
    text = with_fields_at_end(text, "ibv_cq_ex", "\tuint64_t (*read_newer)(struct ibv_cq_ex *current);")
    text = replaced(text, r"(\nenum ibv_qp_init_attr_mask \{\n)", r"\1\tIBV_QP_INIT_ATTR_NEWER = 1 << 20,\n")
    text = replaced(text, r"(\nenum ibv_cq_init_attr_mask \{\n)", r"\1\tIBV_CQ_INIT_ATTR_MASK_NEWER = 1 << 20,\n")
    text = replaced(text, r"(\nenum ibv_create_cq_wc_flags \{\n)", r"\1\tIBV_WC_EX_WITH_NEWER = 1 << 30,\n")
    text = replaced(text, r"(\nenum ibv_qp_create_send_ops_flags \{\n)", r"\1\tIBV_QP_EX_WITH_NEWER = 1 << 30,\n")
    return replaced(text, r"(\nenum ibv_values_mask \{\n)", r"\1\tIBV_VALUES_MASK_NEWER = 1 << 30,\n")


def without_inline(text, name):
    return replaced(text, r"\nstatic inline\b[^;{}]*?\b" + name + r"\([^{}]*\)\n\{\n.*?\n\}\n", "\n")


def older(text):
    # As before query_port was in the table: a function that fills the structure as it was then.
    text = without_inline(text, "___ibv_query_port")
    text = replaced(text, r"#define ibv_query_port\(.*?\n\t[^\n]*\n", "")
    text = replaced(text, r"(\nint ibv_query_port\([^;]*)struct _compat_ibv_port_attr", r"\1struct ibv_port_attr")
    text = without_inline(text, "ibv_advise_mr")
    text = without_inline(text, "ibv_alloc_null_mr")
    text = replaced(text, r"\tint \(\*query_port\).*?(?=\tint \(\*read_counters\))", "")
    text = replaced(text, r"\n\tuint16_t\t\tport_cap_flags2;", "")
    text = replaced(text, r"(\tuint8_t\t\t\talt_timeout;)\n\tuint32_t\t\trate_limit;", r"\1")
    return replaced(text, r"\n\tuint64_t max_dm_size;\n.*?phys_port_cnt_ex;", "")


with open(sys.argv[2], encoding="utf-8") as installed:
    derived = {"newer": newer, "older": older}[sys.argv[1]](installed.read())
with open(sys.argv[3], "w", encoding="utf-8") as output:
    output.write(derived)
