#include "reference.h"

namespace vqkv {
namespace {
ReferenceHook& hook() {
  static ReferenceHook h;
  return h;
}
}  // namespace

void set_reference_hook(ReferenceHook h) {
  hook() = std::move(h);
}

ArrayFunction reference(std::string op, Scalars scalars) {
  return [op = std::move(op), scalars = std::move(scalars)](const std::vector<mx::array>& inputs) {
    return hook()(op, inputs, scalars);
  };
}

ArrayFunction reference_in(ArrayFunction f, std::vector<mx::array> all, std::vector<int> which) {
  return [f = std::move(f), all = std::move(all),
          which = std::move(which)](const std::vector<mx::array>& args) {
    auto inputs = all;
    for (size_t i = 0; i < which.size(); ++i) {
      inputs[which[i]] = args[i];
    }
    return f(inputs);
  };
}

}  // namespace vqkv
