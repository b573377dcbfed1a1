#include "scenarios/swarm/out_of_reach.h"

namespace stagecoach::scenario {
namespace {

constexpr std::string_view kNoGarbage = "both ends are ours, and no byte changes on its way";
constexpr std::string_view kOursOnly = "both ends are ours, and neither does this";
constexpr std::string_view kCredit = "each end posts as many Receives as it grants, of the size that was agreed on";
constexpr std::string_view kReverseCredit = "a server makes no more reverse calls than it was granted";
constexpr std::string_view kOneThread = "a simulated world has one thread, which does nothing in between";
constexpr std::string_view kCqAcks =
    "programs acknowledge first; CqTrafficTest.DestroyingWaitsUntilEventsAreAcknowledged waits, in simulation too";
constexpr std::string_view kObjectAcks =
    "programs acknowledge first; AsyncTest.DestroyingAQpWaitsUntilItsEventsAreAcknowledged waits, in simulation too";
constexpr std::string_view kIdAcks =
    "programs acknowledge first; CmTest.DestroyingAnIdWaitsUntilItsEventsAreAcknowledged waits, in simulation too";
constexpr std::string_view kNoFence = "no program asks for a fence: the RPC stack waits for what must be over";
constexpr std::string_view kNoAtomics = "no program uses atomics";
constexpr std::string_view kNoUc = "no program uses UC";
constexpr std::string_view kSrqSized =
    "a server promises no more shared Receives than there are, and posts each that holds no call";
constexpr std::string_view kSized = "queues are as large as what may be outstanding, which their users count";
constexpr std::string_view kNoLimit = "the swarm does not draw a device that has too few";
constexpr std::string_view kFewClients = "no world has so many clients of one address";
constexpr std::string_view kPatient = "the servers of the swarm wait for a client as long as it takes";
constexpr std::string_view kReadsCounted = "whoever issues RDMA Reads counts them";
constexpr std::string_view kRegistered = "what a work request names stays registered until the work is over";
constexpr std::string_view kNoDatagrams = "no program sends datagrams: connection managers do, and do not wait";
constexpr std::string_view kOneProcess = "a host is one process";
constexpr std::string_view kNoExtensions = "no program has messages of extensions";
constexpr std::string_view kRoom = "a stream that is new has room for so few bytes";
constexpr std::string_view kNoTcp = "streams of a simulated world are its own, and no TCP";
constexpr std::string_view kMemory = "memory does not end; verbs_shim/emulated:no_memory_test has it end";

constexpr OutOfReach kOutOfReach[] = {
    {"assemble.gap_between_segments_closed", kOursOnly},
    {"base.spare_block_taken", kMemory},
    {"channel.cq_waits_for_acknowledgements", kCqAcks},
    {"channel.event_taken_back_from_its_waiter", kOneThread},
    {"channel.object_waits_for_acknowledgements", kObjectAcks},
    {"cm.accept_comes_too_late", kOneThread},
    {"cm.attempt_finds_no_memory", kMemory},
    {"cm.handshake_finds_no_memory", kMemory},
    {"cm.id_gone_while_its_connection_is_attached", kOneThread},
    {"cm.id_waits_for_acknowledgements", kIdAcks},
    {"cm.last_words_not_taken", kRoom},
    {"cm.qp_taken_from_another_id", "a program connects an id by the queue pair that it made on it"},
    {"cm.request_with_too_much_private_data", kOursOnly},
    {"connection.deregistration_refused", "devices deregister what was registered, and windows are let go of first"},
    {"connection.marker_refused", kSized},
    {"connection.post_receive_refused", kSized},
    {"connection.post_send_refused", kSized},
    {"connection.window_refused", "the swarm draws no device with too few windows, and none fails as a whole (EIO)"},
    {"cq.no_memory_to_grow", kMemory},
    {"cq.oldest_completion_overwritten", kSized},
    {"cq.overrun", kSized},
    {"credits.grant_below_calls_in_flight", kOursOnly},
    {"credits.grant_of_zero", kOursOnly},
    {"datagram.link_evicted", "a world has fewer processes than a device keeps links"},
    {"datagram.nobody_waits_for_this_port_any_more", kNoDatagrams},
    {"datagram.own_queue_is_full", "managers send a few datagrams at a time"},
    {"gsi.address_gone_before_its_request", "hosts keep their addresses"},
    {"gsi.established_before_the_rtu", "no program passes on that packets came before the RTU (rdma_notify)"},
    {"gsi.no_gid_for_the_address", "hosts have fewer addresses than a port has GIDs"},
    {"gsi.peer_has_us_wait_for_too_long", "no program takes minutes to answer a request"},
    {"gsi.request_dropped_for_want_of_memory", kMemory},
    {"gsi.request_finds_no_memory", kMemory},
    {"gsi.request_follows_a_redirection", kOneProcess},
    {"gsi.request_in_the_name_of_another", kOursOnly},
    {"gsi.request_of_smaller_packets", "all devices of a world have ports of one MTU"},
    {"gsi.request_sent_on", kOneProcess},
    {"gsi.too_many_requests_of_one_address", kFewClients},
    {"ib.carrier_given_up_to_a_later_rule", "devices have their rules before any connection"},
    {"ib.local_failure_stops_the_send_queue_of_uc", kNoUc},
    {"ib.sent_to_nobody", kNoUc},
    {"injection.no_memory_to_tell_of_it", kMemory},
    {"llp.stream_ends_inside_a_record", "an end that cannot finish a record resets its stream"},
    {"memory.access_refused", kOursOnly},
    {"memory.invalidation_refused", kOursOnly},
    {"memory.invalidation_waits_for_a_pin", kOneThread},
    {"memory.region_kept_by_its_windows",
     "the driver lets go of windows first, and a queue pair unbinds what is bound"},
    {"memory.regions_used_up", kNoLimit},
    {"memory.stag_index_out_of_quarantine", "possible but improbable: a NIC has to free 65,536 STags in one run"},
    {"memory.window_freed_while_bound", "the driver lets go of windows first, and a queue pair unbinds what is bound"},
    {"memory.windows_used_up", kNoLimit},
    {"mpa.malformed_reply", kNoGarbage},
    {"mpa.malformed_request", kNoGarbage},
    {"mpa.peer_refuses_the_crc", kOursOnly},
    {"mpa.peer_wants_more_reads_than_offered", kOursOnly},
    {"mpa.reply_not_taken_in_time", kRoom},
    {"mpa.responders_ord_limited",
     "a server asks for no more than the request allows: connection.outgoing_reads_limited"},
    {"mpa.wrong_crc", kNoGarbage},
    {"nic.buried_before_it_lingers", kOneThread},
    {"nic.client_of_the_loop_finds_no_descriptor", "no system call fails for want of descriptors"},
    {"nic.client_of_the_loop_finds_no_memory", kMemory},
    {"nic.context_closed_with_qps", "a NIC goes after the programs of its host, and with them goes all that they made"},
    {"nic.loop_cannot_be_called", kMemory},
    {"nic.loop_has_no_timer", kMemory},
    {"nic.qps_used_up", kNoLimit},
    {"pool.total_used_up", "no world has as many calls at once as a server has memory for"},
    {"port.attempt_finds_no_memory", kMemory},
    {"port.called_somebody_who_is_not_the_peer", kOursOnly},
    {"port.caller_finds_no_memory", kMemory},
    {"port.no_memory_for_a_carrier", kMemory},
    {"port.no_memory_to_call_later", kMemory},
    {"port.source_refused_too_often", kOursOnly},
    {"port.too_many_visitors_wait", kFewClients},
    {"port.visitor_finds_no_memory", kMemory},
    {"qp.datagram_too_long_for_its_receive", kNoDatagrams},
    {"qp.datagram_waits_for_room", kNoDatagrams},
    {"qp.device_has_failed", "the device does not fail as a whole"},
    {"qp.fenced_local_operation_waits", kNoFence},
    {"qp.no_memory", kMemory},
    {"qp.no_memory_to_give_up", kMemory},
    {"qp.receive_queue_full", kSized},
    {"qp.reset_with_a_connection", "no program resets a queue pair that is connected"},
    {"qp.send_queue_full", kSized},
    {"qp.window_bind_refused", "the driver binds its own windows within its own regions"},
    {"rc.rnr_retries_used_up", "programs ask for retries without end"},
    {"rdmap.answer_to_no_atomic", kNoAtomics},
    {"rdmap.atomic_with_masks_refused", kNoAtomics},
    {"rdmap.buffer_of_a_receive_gone", kRegistered},
    {"rdmap.fenced_work_waits_for_reads", kNoFence},
    {"rdmap.lower_layer_fault", kNoGarbage},
    {"rdmap.malformed_segment", kNoGarbage},
    {"rdmap.more_reads_than_ird_allows", kOursOnly},
    {"rdmap.no_receive_posted", kCredit},
    {"rdmap.read_waits_for_ord", kReadsCounted},
    {"rdmap.responder_waits_for_the_first_record", "a server answers its client, which speaks first"},
    {"rdmap.rtr_by_read", kOursOnly},
    {"rdmap.segment_ends_early_for_its_parts", "no program posts so long a scatter/gather list"},
    {"rdmap.send_longer_than_its_receive", kCredit},
    {"rdmap.sink_of_a_read_gone", kRegistered},
    {"rdmap.sink_of_an_atomic_gone", kNoAtomics},
    {"rdmap.target_of_an_atomic_refused", kNoAtomics},
    {"rdmap.terminate_in_the_bit_order_of_siw", kOursOnly},
    {"rdmap.terminate_that_makes_no_sense", kNoGarbage},
    {"rdmap.work_refused_at_its_start", kRegistered},
    {"rdmap.work_submitted_after_the_end", kOneThread},
    {"requester.answer_to_properties_cannot_be_read", kNoGarbage},
    {"requester.done_dropped", kOursOnly},
    {"requester.err_bad_xdr", kNoGarbage},
    {"requester.err_inval_htype", kNoExtensions},
    {"requester.err_other", kNoExtensions},
    {"requester.extension_answered_otherwise", kNoExtensions},
    {"requester.extension_given_up", kNoExtensions},
    {"requester.extension_not_spoken", kNoExtensions},
    {"requester.flags_withheld", kNoExtensions},
    {"requester.malformed_properties", kNoGarbage},
    {"requester.malformed_reply_ends_its_call", kNoGarbage},
    {"requester.not_marked_as_response", kOursOnly},
    {"requester.peer_announced_its_properties", kOursOnly},
    {"requester.peer_invalidated_unasked", kOursOnly},
    {"requester.properties_nobody_asked_for", kOursOnly},
    {"requester.properties_refused", kOursOnly},
    {"requester.reply_chunk_is_not_of_its_call", kOursOnly},
    {"requester.reply_is_marked_wrongly", kOursOnly},
    {"requester.reply_to_nobody", kOursOnly},
    {"requester.resent_often_enough", "our servers ask for no more than four changes of one call"},
    {"requester.reverse_call_dropped", kOursOnly},
    {"requester.unknown_flags", kOursOnly},
    {"responder.call_beyond_credits_dropped", kReverseCredit},
    {"responder.chunks_beyond_what_is_taken", "what is beyond its limits a service refuses as it is decoded"},
    {"responder.done_for_nothing", kOursOnly},
    {"responder.empty_read_segment", kOursOnly},
    {"responder.extension_answered_wrongly", kNoExtensions},
    {"responder.extension_without_a_handler", kNoExtensions},
    {"responder.flag_and_direction_disagree", kOursOnly},
    {"responder.grant_overrun", kCredit},
    {"responder.malformed_message_dropped", kNoGarbage},
    {"responder.malformed_properties", kNoGarbage},
    {"responder.message_that_is_no_call_dropped", kOursOnly},
    {"responder.nothing_granted", "no world bounds what the connections of an address may have executed"},
    {"responder.promised_data_never_came", kPatient},
    {"responder.properties_once_too_often", kOursOnly},
    {"responder.properties_that_are_an_answer", kOursOnly},
    {"responder.pulled_call_is_not_of_its_header", kNoGarbage},
    {"responder.reply_chunk_of_a_reverse_call_left_alone", kOursOnly},
    {"responder.reply_never_taken", kPatient},
    {"responder.reserved_flags_passed_over", kOursOnly},
    {"responder.reverse_call_to_nobody_dropped", kOursOnly},
    {"responder.version_1_while_probing", kOursOnly},
    {"server.chunk_for_an_item_not_eligible", kOursOnly},
    {"server.credentials_denied", "callers have credentials that everybody takes"},
    {"server.extension_error_is_unknown", kNoExtensions},
    {"server.not_configured", "a client configures a connection once, with what it does first"},
    {"srq.empty", kSrqSized},
    {"srq.full", kSrqSized},
    {"srq.limit_reached", "a server asks for no word of it: every shared Receive is posted or holds a call"},
    {"tcp.attempt_finds_no_memory", kNoTcp},
    {"tcp.lead_taken_from_one_who_does_not_move", kNoTcp},
    {"tcp.listener_finds_no_memory", kNoTcp},
    {"tcp.loop_finds_no_descriptor", kNoTcp},
    {"tcp.loop_finds_no_memory", kNoTcp},
    {"tcp.nobody_to_end_a_socket", kNoTcp},
    {"tcp.wait_goes_on_after_a_signal", kNoTcp},
    {"tcp.watcher_finds_no_descriptor", kNoTcp},
    {"tcp.watcher_finds_no_memory", kNoTcp},
    {"terms.properties_said_again", kOursOnly},
    {"trace.event_lost_for_want_of_memory", kMemory},
    {"xdr.result_inline_beside_unused_write_chunk", kOursOnly},
    {"xdr.write_chunk_with_a_wrong_length", kOursOnly},
};

}  // namespace

std::span<const OutOfReach> MarksOutOfReach() {
  return kOutOfReach;
}

}  // namespace stagecoach::scenario
