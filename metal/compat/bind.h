// Takes the function type of a kernel apart, so that one template can call any kernel.
#pragma once

#include <cstddef>
#include <tuple>
#include <type_traits>
#include <utility>

namespace vqkv {

struct KernelInfo {
  size_t n_buffers;
  size_t params_size;
  const bool* writable;  // per buffer: not a pointer to const
};

/** (buffers..., const Params&, uint3 tgid, uint tid, uint lane, uint sg), where `Uint3` is uint3.
 */
template <typename Fn, typename Uint3>
struct Signature;

template <typename Uint3, typename... A>
struct Signature<void (*)(A...), Uint3> {
  static_assert(sizeof...(A) >= 6, "a kernel takes buffers, params and the four built-ins");

  template <size_t I>
  using Arg = std::tuple_element_t<I, std::tuple<A...>>;

  static constexpr size_t n_buffers = sizeof...(A) - 5;
  using Params = std::remove_const_t<std::remove_reference_t<Arg<n_buffers>>>;
  using Buffers = std::make_index_sequence<n_buffers>;

  static_assert(std::is_same_v<Arg<n_buffers>, const Params&>,
                "the argument after the buffers must be `constant Params& p`");
  static_assert(std::is_same_v<Arg<n_buffers + 1>, Uint3> &&
                    std::is_same_v<Arg<n_buffers + 2>, unsigned> &&
                    std::is_same_v<Arg<n_buffers + 3>, unsigned> &&
                    std::is_same_v<Arg<n_buffers + 4>, unsigned>,
                "the last arguments must be uint3 tgid, uint tid, uint lane, uint sg");

  static KernelInfo info() { return info(Buffers{}); }

 private:
  template <size_t... I>
  static KernelInfo info(std::index_sequence<I...>) {
    static_assert((std::is_pointer_v<Arg<I>> && ...), "buffers must be pointers");
    static const bool writable[] = {!std::is_const_v<std::remove_pointer_t<Arg<I>>>...};
    return {n_buffers, sizeof(Params), writable};
  }
};

}  // namespace vqkv
