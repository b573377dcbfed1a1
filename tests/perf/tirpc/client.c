// client PORT SECONDS: rates of the null procedure and of 1 MiB blocks, as "name value unit" rows.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <rpc/rpc.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "block.h"

static double Seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char** argv) {
  static char out[1 << 20];
  static char in[2 << 20];
  if (argc < 3) return 2;
  const double seconds = atof(argv[2]);
  struct sockaddr_in address = {
      .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[1])), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  int s = socket(AF_INET, SOCK_STREAM, 0);
  if (connect(s, (struct sockaddr*)&address, sizeof(address)) != 0) return 1;
  int one = 1;
  setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  struct netbuf peer = {sizeof(address), sizeof(address), &address};
  CLIENT* client = clnt_vc_create(s, &peer, BLOCK_PROGRAM, BLOCK_VERSION, 4 << 20, 4 << 20);
  if (client == NULL) return 1;
  struct timeval timeout = {25, 0};
  long n = 0;
  double start = Seconds();
  for (; Seconds() - start < seconds; ++n) {
    if (clnt_call(client, 0, (xdrproc_t)xdr_void, NULL, (xdrproc_t)xdr_void, NULL, timeout) != RPC_SUCCESS) return 1;
  }
  printf("tirpc_null_rate %.6g calls/s\n", (double)n / (Seconds() - start));
  block argument = {{sizeof(out), out}};
  int size = 0;
  start = Seconds();
  for (n = 0; Seconds() - start < seconds; ++n) {
    if (clnt_call(client, PUT, (xdrproc_t)xdr_block, (char*)&argument, (xdrproc_t)xdr_int, (char*)&size, timeout) != RPC_SUCCESS)
      return 1;
  }
  printf("tirpc_put_1m %.6g MB/s\n", (double)n * sizeof(out) / (Seconds() - start) / 1e6);
  block result = {{0, in}};
  size = sizeof(out);
  start = Seconds();
  for (n = 0; Seconds() - start < seconds; ++n) {
    if (clnt_call(client, GET, (xdrproc_t)xdr_int, (char*)&size, (xdrproc_t)xdr_block, (char*)&result, timeout) != RPC_SUCCESS)
      return 1;
  }
  printf("tirpc_get_1m %.6g MB/s\n", (double)n * sizeof(out) / (Seconds() - start) / 1e6);
  clnt_destroy(client);
  return 0;
}
