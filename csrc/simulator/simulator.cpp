#include "simulator.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "fault_handler.h"
#include "worker.h"

namespace vqkv::sim {
namespace {

constexpr int kMaxWorkers = 8;  // each reserves the stacks of a threadgroup

struct Kernel {
  Invoke invoke;
  KernelInfo info;
};

// Inside functions: registrars run before other static objects are ready.
std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> r;
  return r;
}
std::set<std::string>& duplicates() {
  static std::set<std::string> d;
  return d;
}

std::mutex mutex;  // guards everything below, and the process-wide signal handlers
std::set<std::string> executed_kernels;
std::vector<std::unique_ptr<Worker>> workers;  // kept: their stacks are costly to map

std::runtime_error error(const std::string& kernel, const std::string& what) {
  return std::runtime_error("[simulator] kernel " + kernel + ": " + what + ".");
}

int default_order() {
  const char* e = std::getenv("VQKV_SIM_ORDER");
  if (!e || !*e)
    return 0;
  char* end;
  const long n = std::strtol(e, &end, 10);
  if (*end || n < 0) {
    throw std::runtime_error("[simulator] VQKV_SIM_ORDER must be a number from 0, but got " +
                             std::string(e) + ".");
  }
  return int(n % 0x7fffffff);
}

const Kernel& find(const Request& r) {
  auto it = registry().find(r.kernel);
  if (it == registry().end())
    throw error(r.kernel, "there is no kernel of this name");
  const KernelInfo& info = it->second.info;
  if (r.n_buffers != info.n_buffers) {
    throw error(r.kernel, "takes " + std::to_string(info.n_buffers) + " buffers, but got " +
                              std::to_string(r.n_buffers));
  }
  if (r.params_size != info.params_size) {
    throw error(r.kernel, "params must have " + std::to_string(info.params_size) +
                              " bytes, but got " + std::to_string(r.params_size));
  }
  if (r.threads == 0 || r.threads > kMaxThreads) {
    throw error(r.kernel, "threads per threadgroup must be 1 to " + std::to_string(kMaxThreads) +
                              ", but got " + std::to_string(r.threads));
  }
  return it->second;
}

void run(Job& job, int n_threads) {
  if (accesses_are_seen())
    n_threads = 1;
  else if (n_threads <= 0)
    n_threads = int(std::thread::hardware_concurrency());
  const uint64_t n = std::min<uint64_t>(std::clamp(n_threads, 1, kMaxWorkers), job.threadgroups());
  while (workers.size() < n)
    workers.push_back(std::make_unique<Worker>());
  auto work = [&job](Worker* w) {
    try {
      SignalStack stack;
      w->run(job);
    } catch (const std::exception& e) {
      job.fail(e.what());
    }
  };
  FaultHandler handler;
  // Started per launch rather than kept: cheap beside a launch, and safe to fork from.
  std::vector<std::thread> others;
  for (size_t i = 1; i < n; i++)
    others.emplace_back(work, workers[i].get());
  work(workers[0].get());
  for (auto& t : others)
    t.join();
}

}  // namespace

Registrar::Registrar(const char* name, Invoke invoke, KernelInfo info) {
  if (!registry().emplace(name, Kernel{invoke, info}).second)
    duplicates().insert(name);
}

void launch(const Request& r, int n_threads, int order) {
  std::lock_guard<std::mutex> lock(mutex);
  const Kernel& kernel = find(r);
  if (order < 0)
    order = default_order();
  // the caller's bytes need not be aligned
  std::vector<std::max_align_t> params(r.params_size / sizeof(std::max_align_t) + 1);
  std::memcpy(params.data(), r.params, r.params_size);

  Job job;
  job.kernel = r.kernel;
  job.invoke = kernel.invoke;
  job.params = params.data();
  std::copy(r.grid, r.grid + 3, job.grid);
  job.threads = r.threads;
  job.order = order;
  if (job.threadgroups() == 0)
    return;
  job.buffers.reserve(r.n_buffers);
  for (size_t i = 0; i < r.n_buffers; i++) {
    job.buffers.emplace_back(r.buffers[i].data, r.buffers[i].size, kernel.info.writable[i]);
    job.pointers.push_back(job.buffers[i].data());
  }
  executed_kernels.insert(r.kernel);
  run(job, n_threads);
  for (size_t i = 0; i < r.n_buffers; i++) {
    const GuardedBuffer& b = job.buffers[i];
    if (!b.writable())
      continue;
    if (!b.intact())
      job.fail("wrote past an end of buffer " + std::to_string(i));
    if (b.size())
      std::memcpy(r.buffers[i].data, b.data(), b.size());
  }
  if (job.failed)
    throw error(r.kernel, job.error);
}

std::vector<std::string> kernels() {
  if (!duplicates().empty())
    throw error(*duplicates().begin(), "is instantiated twice");
  std::vector<std::string> names;
  for (const auto& k : registry())
    names.push_back(k.first);
  return names;
}

std::vector<std::string> executed() {
  std::lock_guard<std::mutex> lock(mutex);
  return {executed_kernels.begin(), executed_kernels.end()};
}

}  // namespace vqkv::sim
