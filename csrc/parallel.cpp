#include "parallel.h"

#include <pthread.h>
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace vqkv {
namespace {

thread_local bool inside = false;  // this thread is running a body: nested calls stay serial

struct Job {
  const std::function<void(int64_t)>* body;
  int64_t count;
  std::atomic<int64_t> next{0};
  int helpers = 0;  // workers that may still touch this job; guarded by the pool's mutex
  std::mutex error_mutex;
  std::exception_ptr error;

  Job(const std::function<void(int64_t)>* body, int64_t count) : body(body), count(count) {}

  bool exhausted() const { return next.load(std::memory_order_relaxed) >= count; }

  void run() {
    inside = true;
    int64_t i;
    while ((i = next.fetch_add(1, std::memory_order_relaxed)) < count) {
      try {
        (*body)(i);
      } catch (...) {
        std::lock_guard lock(error_mutex);
        if (!error) {
          error = std::current_exception();
        }
        next.store(count, std::memory_order_relaxed);
      }
    }
    inside = false;
  }
};

class Pool {
 public:
  void run(Job& job, int workers) {
    {
      std::lock_guard lock(mutex_);
      start(workers);
      jobs_.push_back(&job);
    }
    work_.notify_all();
    job.run();
    std::unique_lock lock(mutex_);
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), &job));
    done_.wait(lock, [&] { return job.helpers == 0; });
  }

 private:
  // Fewer threads than asked for only make a call slower, so a refusal is not an error.
  void start(int workers) {
    try {
      for (; started_ < workers; ++started_) {
        std::thread([this] { serve(); }).detach();
      }
    } catch (const std::system_error&) {
    }
  }

  Job* open_job() {
    for (auto* job : jobs_) {
      if (!job->exhausted()) {
        return job;
      }
    }
    return nullptr;
  }

  [[noreturn]] void serve() {
    std::unique_lock lock(mutex_);
    while (true) {
      Job* job = nullptr;
      work_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      ++job->helpers;
      lock.unlock();
      job->run();
      lock.lock();
      if (--job->helpers == 0) {
        done_.notify_all();
      }
    }
  }

  std::mutex mutex_;
  std::condition_variable work_, done_;
  std::vector<Job*> jobs_;
  int started_ = 0;
};

// Never destroyed: workers may outlive static destructors, and joining them at exit can deadlock.
std::atomic<Pool*> pool{nullptr};

// A forked child has none of the workers, and a copy of the mutex in any state.
void forget_pool() {
  pool.store(nullptr);
  inside = false;
}

Pool& current_pool() {
  if (auto* p = pool.load()) {
    return *p;
  }
  [[maybe_unused]] static const int registered = pthread_atfork(nullptr, nullptr, forget_pool);
  auto* fresh = new Pool;
  Pool* expected = nullptr;
  if (pool.compare_exchange_strong(expected, fresh)) {
    return *fresh;
  }
  delete fresh;
  return *expected;
}

int usable_cores() {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    return CPU_COUNT(&set);
  }
#endif
  return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace

int num_threads() {
  static const int n = [] {
    const char* e = std::getenv("VQKV_NUM_THREADS");
    int asked = e ? std::atoi(e) : 0;
    return std::clamp(asked > 0 ? asked : usable_cores(), 1, 256);
  }();
  return n;
}

void parallel_for(int64_t n, const std::function<void(int64_t)>& body) {
  const int workers = static_cast<int>(std::min<int64_t>(n, num_threads())) - 1;
  if (inside || workers < 1) {
    for (int64_t i = 0; i < n; ++i) {
      body(i);
    }
    return;
  }
  Job job(&body, n);
  current_pool().run(job, workers);
  if (job.error) {
    std::rethrow_exception(job.error);
  }
}

}  // namespace vqkv
