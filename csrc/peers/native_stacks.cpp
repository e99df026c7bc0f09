// Writes the native stacks of this process's threads, when it or another process asks for them.
//
// A signal handler runs on one thread after the other and writes addresses; the reader,
// megatron/peers/native_stacks.py, finds their names. The handler allocates nothing, takes no lock
// of its own and waits for no thread longer than its deadline. Not guaranteed: backtrace() takes
// the lock of the dynamic loader where libgcc is older than 12 or glibc older than 2.35; it stops
// at code without unwind tables; and a thread with a few KiB of stack left may overflow it.
//
// A function whose parameters or meaning change gets another name: Python calls no other source.
#include <cxxabi.h>
#include <dirent.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace {

constexpr int kFrames = 32;  // innermost ones of a thread; the reader prints fewer
constexpr int64_t kThreadNs = 100'000'000, kAllNs = 1'000'000'000;  // deadlines

int file = -1, native_signal = 0, python_signal = 0;
std::atomic<bool> is_writing{false};  // a dump is under way
std::atomic<int> asked{0};            // the thread that is to write next; negative while it writes
static_assert(std::atomic<int>::is_always_lock_free);  // as a signal handler needs it

int thread_id() { return static_cast<int>(syscall(SYS_gettid)); }

bool send(int thread, int number) { return syscall(SYS_tgkill, getpid(), thread, number) == 0; }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

// Writes "<thread> <address> <address> ...\n", innermost frame first, in one call.
void write_stack(int thread) {
  void* frames[kFrames];
  char text[(kFrames + 1) * 17 + 1];
  char* end = text;
  const auto append = [&end](uint64_t number, uint64_t base, char after) {
    char digits[20];
    int count = 0;
    do digits[count++] = "0123456789abcdef"[number % base];
    while ((number /= base) != 0);
    while (count > 0) *end++ = digits[--count];
    *end++ = after;
  };
  append(thread, 10, ' ');
  const int count = backtrace(frames, kFrames);
  for (int i = 0; i < count; i++) append(reinterpret_cast<uintptr_t>(frames[i]), 16, ' ');
  end[-1] = '\n';
  if (write(file, text, end - text) < 0) return;  // the reader says that something is missing
}

// Lets a thread write its stack; returns false where no other thread may be asked any more.
bool ask(int thread, int64_t deadline_ns) {
  asked.store(thread);
  if (!send(thread, native_signal)) asked.store(0);  // it has ended
  const int64_t until_ns = now_ns() + kThreadNs;
  while (asked.load() != 0) {
    const int64_t at_ns = now_ns();
    int expected = thread;
    // It blocks the signal, or waits in the kernel. It may run the handler later, and finds that.
    if (at_ns > until_ns && asked.compare_exchange_strong(expected, 0)) break;
    if (at_ns > deadline_ns) return false;  // it still writes
    const timespec pause{0, 200'000};
    nanosleep(&pause, nullptr);
  }
  return now_ns() < deadline_ns;
}

// Asks all threads but `own`.
bool ask_others(int own, int64_t deadline_ns) {
  const int folder = open("/proc/self/task", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return true;
  alignas(dirent64) char entries[2048];
  bool goes_on = true;
  long size = 0;
  while (goes_on && (size = syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
    for (long at = 0; goes_on && at < size;) {
      const auto* entry = reinterpret_cast<const dirent64*>(entries + at);
      at += entry->d_reclen;
      int thread = 0;
      for (const char* c = entry->d_name; *c >= '0' && *c <= '9'; c++) thread = 10 * thread + *c - '0';
      if (thread != 0 && thread != own) goes_on = ask(thread, deadline_ns);
    }
  }
  close(folder);
  return goes_on;
}

void write_all(bool with_own, bool with_python) {
  if (is_writing.exchange(true)) return;
  const int own = thread_id();
  if (with_python) send(own, python_signal);  // its handler returns before this call does
  if (with_own) write_stack(own);
  ask_others(own, now_ns() + kAllNs);
  if (write(file, "end\n", 4) < 0) return;
  // A thread that still writes keeps the next dump from beginning.
  if (asked.load() == 0) is_writing.store(false);
}

void on_signal(int number, siginfo_t* info, void*) {
  const int before = errno;
  int expected = thread_id();
  if (asked.compare_exchange_strong(expected, -expected)) {
    write_stack(expected);
    asked.store(0);
  } else if (info->si_code == SI_USER) {  // from another process, not from send() above
    write_all(true, number != native_signal);
  }
  errno = before;
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// Installs the handler of two signals, which writes into the descriptor `output`: `native` stacks,
// or `both` kinds, for which it sends `python`, the signal of faulthandler, to its own thread.
EXPORTED int megatron_stacks_install(int output, int native, int both, int python) {
  file = output, native_signal = native, python_signal = python;
  void* frames[2];
  backtrace(frames, 2);  // loads libgcc, which no handler may do
  struct sigaction action {};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_RESTART;
  return sigaction(native, &action, nullptr) | sigaction(both, &action, nullptr);
}

// Writes the stacks of all threads but the calling one.
EXPORTED int megatron_stacks_write() {
  write_all(false, false);
  return 0;
}

// Copies the readable name of the function at an address of this process; returns whether it has one.
EXPORTED int megatron_stacks_name(void* address, char* text, size_t size) {
  Dl_info found;
  if (dladdr(address, &found) == 0 || found.dli_sname == nullptr) return 0;
  int status = 0;
  char* readable = abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status);
  snprintf(text, size, "%s", readable != nullptr ? readable : found.dli_sname);
  free(readable);
  return 1;
}
