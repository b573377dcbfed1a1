#include "rpcrdma/api/co_service.h"

namespace stagecoach::rpcrdma {

void CoService::Handle(Request request) {
  CallHeader header = request.header();
  asio::co_spawn(executor_, Serve(std::move(request)),
                 [header = std::move(header), running = Running(state_)](std::exception_ptr exception) {
                   if (!exception) return;
                   State& state = running.state();
                   ++state.exceptions;
                   if (state.observer) state.observer(header, std::move(exception));
                 });
}

}  // namespace stagecoach::rpcrdma
