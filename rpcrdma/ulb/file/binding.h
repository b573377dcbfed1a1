// The Upper-Layer Binding of the bulk file program (bulk_file.x says the same in words).
//
// The data of WRITE and of READ may be placed directly, nothing else. No port is assigned to the program.
#pragma once

#include "rpcrdma/binding/binding.h"

namespace stagecoach::rpcrdma::file {

extern const Binding kBinding;

}  // namespace stagecoach::rpcrdma::file
