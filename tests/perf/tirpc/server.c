// Serves block.x over TCP on a free loopback port, which it prints.
#include <arpa/inet.h>
#include <rpc/rpc.h>
#include <rpc/svc.h>
#include <stdio.h>
#include <sys/socket.h>

#include "block.h"

void block_program_1(struct svc_req* request, SVCXPRT* transport);

int* put_1_svc(block* argument, struct svc_req* request) {
  static int size;
  (void)request;
  size = (int)argument->data.data_len;
  return &size;
}

block* get_1_svc(int* size, struct svc_req* request) {
  static block result;
  static char bytes[4 << 20];
  (void)request;
  result.data.data_val = bytes;
  result.data.data_len = *size < 0 || *size > (int)sizeof(bytes) ? 0 : (unsigned)*size;
  return &result;
}

int main(void) {
  int listener = socket(AF_INET, SOCK_STREAM, 0);
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
  socklen_t size = sizeof(address);
  if (bind(listener, (struct sockaddr*)&address, size) != 0 || listen(listener, 8) != 0) return 1;
  getsockname(listener, (struct sockaddr*)&address, &size);
  SVCXPRT* transport = svc_vc_create(listener, 4 << 20, 4 << 20);
  if (transport == NULL || !svc_register(transport, BLOCK_PROGRAM, BLOCK_VERSION, block_program_1, 0)) return 1;
  printf("%d\n", ntohs(address.sin_port));
  fflush(stdout);
  svc_run();
  return 1;
}
