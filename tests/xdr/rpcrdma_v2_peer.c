/* Version 2 headers as the code sees them that rpcgen makes of rpcrdma_v2.x.
 *
 * For each line of hexadecimal digits on standard input, a header with the first word of its RPC message if it has one,
 * two lines on standard output: the same header encoded from the structures it was decoded to, and these in words, as
 * ToString of rpcrdma/wire/header.h has them. "refused" twice if it cannot be decoded, or not to the end.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "rpcrdma_v2.h"

static char message[1 << 16];
static char again[1 << 16];
static char line[1 << 18];

static void print_segment(const rpcrdma2_segment* segment) {
  printf("0x%08x+%u@0x%llx", segment->rdma_handle, segment->rdma_length, (unsigned long long)segment->rdma_offset);
}

static void print_chunk(const rpcrdma2_write_chunk* chunk) {
  printf("[");
  for (u_int i = 0; i < chunk->rdma_target.rdma_target_len; ++i) {
    if (i > 0) printf(" ");
    print_segment(&chunk->rdma_target.rdma_target_val[i]);
  }
  printf("]");
}

static void print_lists(const rpcrdma2_chunk_lists* lists) {
  if (lists->rdma_inv_handle != 0) printf(" inv_handle 0x%08x", lists->rdma_inv_handle);
  if (lists->rdma_reads == NULL && lists->rdma_writes == NULL && lists->rdma_reply == NULL) printf(" no chunks");
  for (const rpcrdma2_read_list* read = lists->rdma_reads; read != NULL; read = read->rdma_next) {
    printf(read == lists->rdma_reads ? " reads [" : " ");
    printf("%u:", read->rdma_entry.rdma_position);
    print_segment(&read->rdma_entry.rdma_target);
    if (read->rdma_next == NULL) printf("]");
  }
  for (const rpcrdma2_write_list* write = lists->rdma_writes; write != NULL; write = write->rdma_next) {
    printf(write == lists->rdma_writes ? " writes " : " ");
    print_chunk(&write->rdma_entry);
  }
  if (lists->rdma_reply != NULL) {
    printf(" reply ");
    print_chunk(lists->rdma_reply);
  }
}

static void print_error(const rpcrdma2_error* error) {
  switch (error->rdma_err) {
    case RDMA2_ERR_VERS:
      printf(" ERR_VERS (%u to %u supported)", error->rpcrdma2_error_u.rdma_vrange.rdma_vers_low,
             error->rpcrdma2_error_u.rdma_vrange.rdma_vers_high);
      break;
    case RDMA2_ERR_BAD_XDR:
      printf(" ERR_BAD_XDR");
      break;
    case RDMA2_ERR_INVAL_HTYPE:
      printf(" ERR_INVAL_HTYPE");
      break;
    case RDMA2_ERR_READ_CHUNKS:
      printf(" ERR_READ_CHUNKS (at most %u)", error->rpcrdma2_error_u.rdma_max_chunks);
      break;
    case RDMA2_ERR_WRITE_CHUNKS:
      printf(" ERR_WRITE_CHUNKS (at most %u)", error->rpcrdma2_error_u.rdma_max_chunks);
      break;
    case RDMA2_ERR_SEGMENTS:
      printf(" ERR_SEGMENTS (at most %u in a chunk)", error->rpcrdma2_error_u.rdma_max_segments);
      break;
    case RDMA2_ERR_WRITE_RESOURCE:
      if (error->rpcrdma2_error_u.rdma_writeres.rdma_chunk_index == 0) {
        printf(" ERR_WRITE_RESOURCE (a chunk");
      } else {
        printf(" ERR_WRITE_RESOURCE (chunk %u", error->rpcrdma2_error_u.rdma_writeres.rdma_chunk_index);
      }
      printf(" needs %u bytes)", error->rpcrdma2_error_u.rdma_writeres.rdma_length_needed);
      break;
    case RDMA2_ERR_REPLY_RESOURCE:
      printf(" ERR_REPLY_RESOURCE (%u bytes needed)", error->rpcrdma2_error_u.rdma_length_needed);
      break;
    case RDMA2_ERR_SYSTEM:
      printf(" ERR_SYSTEM");
      break;
    default:
      printf(" error code %u", error->rdma_err);
  }
}

static void print_property(rpcrdma2_propval* property) {
  char* const data = property->rdma_data.rdma_data_val;
  const u_int size = property->rdma_data.rdma_data_len;
  static const char* const kLevels[] = {"none", "inline", "general"};
  XDR in;
  if (property->rdma_which == RDMA2_PROPID_RBSIZ) {
    rpcrdma2_prop_rbsiz bytes = 0;
    printf("receive buffer size ");
    xdrmem_create(&in, data, size, XDR_DECODE);
    if (size == 0) {
      printf("default");
    } else if (xdr_rpcrdma2_prop_rbsiz(&in, &bytes)) {
      printf("%u", bytes);
    }
  } else if (property->rdma_which == RDMA2_PROPID_BRS) {
    rpcrdma2_prop_brs level = RDMA2_RVREQSUP_NONE;
    printf("reverse requests ");
    xdrmem_create(&in, data, size, XDR_DECODE);
    if (size == 0) {
      printf("default");
    } else if (xdr_rpcrdma2_prop_brs(&in, &level)) {
      printf("%s", kLevels[level]);
    }
  } else {
    printf("property %u ", property->rdma_which);
    if (size == 0) {
      printf("default");
      return;
    }
    printf("[");
    for (u_int i = 0; i < size; ++i) printf("%02x", (unsigned char)data[i]);
    printf("]");
  }
}

static void print_properties(const rpcrdma2_propset* set) {
  if (set->rpcrdma2_propset_len == 0) printf(" no properties");
  for (u_int i = 0; i < set->rpcrdma2_propset_len; ++i) {
    printf(i == 0 ? " " : ", ");
    print_property(&set->rpcrdma2_propset_val[i]);
  }
}

/* What the header type selects. */
union body {
  rpcrdma2_msg msg;
  rpcrdma2_nomsg nomsg;
  rpcrdma2_error error;
  rpcrdma2_connprop connprop;
};

static bool_t xdr_body(XDR* xdr, rpcrdma2_proc type, union body* body) {
  switch (type) {
    case RDMA2_MSG:
      return xdr_rpcrdma2_msg(xdr, &body->msg);
    case RDMA2_NOMSG:
      return xdr_rpcrdma2_nomsg(xdr, &body->nomsg);
    case RDMA2_ERROR:
      return xdr_rpcrdma2_error(xdr, &body->error);
    case RDMA2_CONNPROP:
      return xdr_rpcrdma2_connprop(xdr, &body->connprop);
  }
  return FALSE;
}

static void print_header(const rpcrdma2_hdr_prefix* prefix, const union body* body) {
  const char* type = "";
  switch (prefix->rdma_start.rdma_htype) {
    case RDMA2_MSG:
      type = "RDMA2_MSG";
      break;
    case RDMA2_NOMSG:
      type = "RDMA2_NOMSG";
      break;
    case RDMA2_ERROR:
      type = "RDMA2_ERROR";
      break;
    case RDMA2_CONNPROP:
      type = "RDMA2_CONNPROP";
      break;
  }
  printf("%s xid %08x credits %u flags %s", type, prefix->rdma_start.rdma_xid, prefix->rdma_start.rdma_credit,
         prefix->rdma_flags == RPCRDMA2_F_RESPONSE ? "RESPONSE" : "0");
  switch (prefix->rdma_start.rdma_htype) {
    case RDMA2_MSG:
      print_lists(&body->msg.rdma_chunks);
      break;
    case RDMA2_NOMSG:
      print_lists(&body->nomsg.rdma_chunks);
      break;
    case RDMA2_ERROR:
      print_error(&body->error);
      break;
    case RDMA2_CONNPROP:
      print_properties(&body->connprop.rdma_props);
      break;
  }
  printf("\n");
}

static void answer(u_int size) {
  XDR in, out;
  rpcrdma2_hdr_prefix prefix;
  union body body;
  memset(&prefix, 0, sizeof prefix);
  memset(&body, 0, sizeof body);
  xdrmem_create(&in, message, size, XDR_DECODE);
  xdrmem_create(&out, again, sizeof again, XDR_ENCODE);
  if (!xdr_rpcrdma2_hdr_prefix(&in, &prefix) || !xdr_body(&in, prefix.rdma_start.rdma_htype, &body) ||
      xdr_getpos(&in) != size || !xdr_rpcrdma2_hdr_prefix(&out, &prefix) ||
      !xdr_body(&out, prefix.rdma_start.rdma_htype, &body)) {
    printf("refused\nrefused\n");
    return;
  }
  for (u_int i = 0; i < xdr_getpos(&out); ++i) printf("%02x", (unsigned char)again[i]);
  printf("\n");
  print_header(&prefix, &body);
}

int main(void) {
  while (fgets(line, sizeof line, stdin) != NULL) {
    u_int size = 0;
    unsigned byte = 0;
    while (size < sizeof message && sscanf(line + 2 * size, "%2x", &byte) == 1) message[size++] = (char)byte;
    answer(size);
  }
  return 0;
}
