// Where the transports differ in what the RPC stack meets, and why; all else is the same on both.
#pragma once

#include <infiniband/verbs.h>

namespace stagecoach::e2e {

struct TransportTraits {
  ibv_transport_type type;
  // What becomes of a Send for which no Receive is posted.
  bool send_without_receive_ends_the_connection;
  const char* why;
};

inline constexpr TransportTraits kTransports[] = {
    {IBV_TRANSPORT_IWARP, true,
     "an untagged message without a buffer is an error of the stream, which ends (RFC 5041 section 7, RFC 5040 section "
     "7)"},
    {IBV_TRANSPORT_IB, false,
     "the receiver says RNR NAK and the sender tries again (IBTA volume 1, chapter 9.7.5), for ever if rnr_retry is 7, "
     "as "
     "it is here"},
};

// Of the device that tests run on.
inline const TransportTraits& Transport() {
  int count = 0;
  ibv_device** const devices = ibv_get_device_list(&count);
  const TransportTraits* found = &kTransports[0];
  for (const TransportTraits& each : kTransports) {
    if (count > 0 && devices[0]->transport_type == each.type) found = &each;
  }
  ibv_free_device_list(devices);
  return *found;
}

}  // namespace stagecoach::e2e
