// The pretend device: memory is the host's, a stream does its work at once (collectives later, in lazy mode), an event is a
// place in a stream's work.
#include "runtime.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

namespace {

constexpr int kMaxDevices = 64;
constexpr size_t kAlignment = 512;
constexpr int64_t kCubeCores = 24, kVectorCores = 48;

thread_local int current_device = 0;
char contexts[kMaxDevices];  // a context is an address in here

int device_count() { return static_cast<int>(std::min<long>(sim::setting("SIM_NPU_COUNT", 0), kMaxDevices)); }
size_t memory_bytes() { return static_cast<size_t>(sim::setting("SIM_NPU_MEMORY_MIB", 16384)) << 20; }

std::mutex message_mutex;
char message[512] = "no error";

std::mutex memory_mutex;
std::map<const char *, size_t> blocks;
size_t used_bytes = 0;

struct Stream;
struct Piece {
  std::function<int()> work;
  Stream *waits_for;  // with the place in that stream's work; null for other work
  uint64_t place;
};
struct Stream {
  int32_t id = 0;
  // One thread at a time does a stream's work, and that of streams it waits for inside it. Two threads cannot come to wait for
  // each other here: a stream waits only for what another was given before.
  std::recursive_mutex working;
  std::mutex mutex;  // of `work`
  std::deque<Piece> work;
  std::atomic<uint64_t> given{0}, done{0};
  std::atomic<bool> failed{false};  // a piece had an error: everybody who waits hears of it, whoever has done the piece
};
struct Event {
  double time = sim::milliseconds();
  Stream *stream = nullptr;
  uint64_t place = 0;
};

std::mutex streams_mutex;
std::vector<Stream *> streams;  // never freed: an event may outlive its stream

int work_until(Stream *stream, uint64_t place) {
  if (stream == nullptr) return ACL_SUCCESS;
  if (!stream->failed && stream->done.load() >= place) return ACL_SUCCESS;
  std::lock_guard<std::recursive_mutex> guard(stream->working);
  while (!stream->failed && stream->done.load() < place) {
    Piece piece;
    {
      std::lock_guard<std::mutex> queue(stream->mutex);
      piece = std::move(stream->work.front());
      stream->work.pop_front();
    }
    if (piece.work()) stream->failed = true;
    ++stream->done;
  }
  return stream->failed ? ACL_ERROR_RT_INTERNAL_ERROR : ACL_SUCCESS;
}

int give(aclrtStream stream, Piece piece, uint64_t *place) {
  if (place) *place = 0;
  if (!sim::lazy() || stream == nullptr) return piece.work();
  auto *own = static_cast<Stream *>(stream);
  std::lock_guard<std::mutex> guard(own->mutex);
  own->work.push_back(std::move(piece));
  const uint64_t last = ++own->given;
  if (place) *place = last;
  return 0;
}

// Do what the stream's waits wait for, and nothing of its own.
void come_after_waits(Stream *stream) {
  std::vector<std::pair<Stream *, uint64_t>> waits;
  {
    std::lock_guard<std::mutex> guard(stream->mutex);
    for (const auto &piece : stream->work)
      if (piece.waits_for) waits.emplace_back(piece.waits_for, piece.place);
  }
  for (const auto &[other, place] : waits) work_until(other, place);
}

}  // namespace

namespace sim {

int finish(aclrtStream stream) {
  auto *own = static_cast<Stream *>(stream);
  return own ? work_until(own, own->given.load()) : ACL_SUCCESS;
}

int finish_until(aclrtStream stream, uint64_t place) { return work_until(static_cast<Stream *>(stream), place); }

bool is_done(aclrtStream stream, uint64_t place) {
  auto *own = static_cast<Stream *>(stream);
  return own == nullptr || own->done.load() >= place;
}

int give(aclrtStream stream, std::function<int()> work, uint64_t *place) {
  return give(stream, Piece{std::move(work), nullptr, 0}, place);
}

void hide(aclrtStream stream, const void *written, size_t written_bytes, const void *read, size_t read_bytes) {
  if (!lazy()) return;
  if (auto *own = static_cast<Stream *>(stream)) come_after_waits(own);
  const char *out = static_cast<const char *>(written), *in = static_cast<const char *>(read);
  const bool overlap = out < in + read_bytes && in < out + written_bytes;
  if (written_bytes && !overlap) memset(const_cast<void *>(written), 0xFF, written_bytes);
}

void say(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::lock_guard<std::mutex> guard(message_mutex);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  fprintf(stderr, "[sim] %s\n", message);
}

double milliseconds() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

}  // namespace sim

using sim::finish;

static int finish_all() {
  std::vector<Stream *> all;
  {
    std::lock_guard<std::mutex> guard(streams_mutex);
    all = streams;
  }
  for (auto *stream : all)
    if (int error = finish(stream)) return error;
  return ACL_SUCCESS;
}

extern "C" {

// ---- process, device, context

aclError aclInit(const char *) { return ACL_SUCCESS; }
aclError aclFinalize() { return ACL_SUCCESS; }
aclError aclrtGetDeviceCount(uint32_t *count) { *count = device_count(); return ACL_SUCCESS; }
const char *aclrtGetSocName() { const char *name = getenv("SIM_NPU_SOC"); return name ? name : "Ascend910B3"; }
aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= device_count()) return ACL_ERROR_RT_CONTEXT_NULL;
  current_device = device;
  return ACL_SUCCESS;
}
aclError aclrtResetDevice(int32_t) { return ACL_SUCCESS; }
aclError aclrtGetDevice(int32_t *device) {
  *device = current_device;
  return device_count() ? ACL_SUCCESS : ACL_ERROR_RT_CONTEXT_NULL;
}
aclError aclrtGetCurrentContext(aclrtContext *context) { *context = &contexts[current_device]; return ACL_SUCCESS; }
aclError aclrtSetCurrentContext(aclrtContext context) {
  current_device = static_cast<int>(static_cast<char *>(context) - contexts);
  return ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t *flags, int32_t *active) {
  if (flags) *flags = 0;
  *active = 1;
  return ACL_SUCCESS;
}
aclError aclrtGetLogicDevIdByUserDevId(const int32_t user, int32_t *const logical) { *logical = user; return ACL_SUCCESS; }
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t, int32_t) { *can = 1; return ACL_SUCCESS; }
aclError aclrtDeviceGetBareTgid(int32_t *pid) { *pid = getpid(); return ACL_SUCCESS; }
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t *value) {
  *value = what == ACL_DEVICE_INFO_VECTOR_CORE_NUM ? kVectorCores : kCubeCores;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr attribute, int64_t *value) {
  *value = attribute == ACL_DEV_ATTR_VECTOR_CORE_NUM ? kVectorCores : kCubeCores;
  return ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t *value) {
  *value = type == ACL_RT_DEV_RES_VECTOR_CORE ? kVectorCores : kCubeCores;
  return ACL_SUCCESS;
}
aclError aclsysGetVersionStr(char *, char *version) { strcpy(version, "8.5.0"); return ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }
aclError aclGetCompileopt(aclCompileOpt, char *value, size_t length) {
  snprintf(value, length, "disable");
  return ACL_SUCCESS;
}
const char *aclGetRecentErrMsg() { return message; }
void aclAppLog(aclLogLevel, const char *, const char *, uint32_t, const char *, ...) {}

// ---- memory

aclError aclrtMalloc(void **pointer, size_t size, aclrtMemMallocPolicy) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  size = (size + kAlignment - 1) / kAlignment * kAlignment;
  if (used_bytes + size > memory_bytes() || posix_memalign(pointer, kAlignment, size + kAlignment))
    return ACL_ERROR_RT_MEMORY_ALLOCATION;
  blocks[static_cast<char *>(*pointer)] = size;
  used_bytes += size;
  return ACL_SUCCESS;
}
aclError aclrtMallocAlign32(void **pointer, size_t size, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(pointer, size, policy);
}
aclError aclrtFree(void *pointer) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  auto block = blocks.find(static_cast<char *>(pointer));
  if (block == blocks.end()) return ACL_ERROR_RT_PARAM_INVALID;
  used_bytes -= block->second;
  blocks.erase(block);
  free(pointer);
  return ACL_SUCCESS;
}
aclError aclrtMallocHost(void **pointer, size_t size) {
  return posix_memalign(pointer, 64, size + 64) ? ACL_ERROR_RT_MEMORY_ALLOCATION : ACL_SUCCESS;
}
aclError aclrtFreeHost(void *pointer) { free(pointer); return ACL_SUCCESS; }
aclError aclrtGetMemInfo(aclrtMemAttr, size_t *free_bytes, size_t *total_bytes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  *total_bytes = memory_bytes();
  *free_bytes = *total_bytes - used_bytes;
  return ACL_SUCCESS;
}
aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes) {
  std::lock_guard<std::mutex> guard(memory_mutex);
  memset(attributes, 0, sizeof *attributes);
  const char *address = static_cast<const char *>(pointer);
  auto block = blocks.upper_bound(address);
  const bool ours = block != blocks.begin() && address < std::prev(block)->first + std::prev(block)->second;
  attributes->location.type = ours ? ACL_MEM_LOCATION_TYPE_DEVICE : ACL_MEM_LOCATION_TYPE_HOST;
  return ACL_SUCCESS;
}
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind) {
  if (size > room) return ACL_ERROR_RT_PARAM_INVALID;
  memmove(to, from, size);
  return ACL_SUCCESS;
}
// A copy comes after what its stream was given before: on the host that is now.
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t size, aclrtMemcpyKind kind, aclrtStream stream) {
  if (int error = finish(stream)) return error;
  return aclrtMemcpy(to, room, from, size, kind);
}
aclError aclrtMemset(void *pointer, size_t, int32_t value, size_t size) { memset(pointer, value, size); return ACL_SUCCESS; }
aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t size, aclrtStream stream) {
  if (int error = finish(stream)) return error;
  return aclrtMemset(pointer, room, value, size);
}

// ---- streams

aclError aclrtCreateStreamWithConfig(aclrtStream *stream, uint32_t, uint32_t) {
  static std::atomic<int32_t> next_id{1};
  auto *own = new Stream;
  own->id = next_id++;
  std::lock_guard<std::mutex> guard(streams_mutex);
  streams.push_back(own);
  *stream = own;
  return ACL_SUCCESS;
}
aclError aclrtCreateStream(aclrtStream *stream) { return aclrtCreateStreamWithConfig(stream, 0, 0); }
aclError aclrtDestroyStream(aclrtStream stream) { return finish(stream); }
aclError aclrtDestroyStreamForce(aclrtStream stream) { return finish(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t *id) {
  *id = stream ? static_cast<Stream *>(stream)->id : 0;
  return ACL_SUCCESS;
}
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status) {
  auto *own = static_cast<Stream *>(stream);
  const bool complete = own == nullptr || own->done.load() >= own->given.load();
  *status = complete ? ACL_STREAM_STATUS_COMPLETE : ACL_STREAM_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtSynchronizeStream(aclrtStream stream) { return finish(stream); }
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t) { return finish(stream); }
aclError aclrtSynchronizeDevice() { return finish_all(); }
aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return finish_all(); }

// ---- events

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t) { *event = new Event; return ACL_SUCCESS; }
aclError aclrtCreateEventWithFlag(aclrtEvent *event, uint32_t) { *event = new Event; return ACL_SUCCESS; }
aclError aclrtDestroyEvent(aclrtEvent event) { delete static_cast<Event *>(event); return ACL_SUCCESS; }
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream) {
  auto *own = static_cast<Event *>(event);
  own->time = sim::milliseconds();
  own->stream = static_cast<Stream *>(stream);
  own->place = own->stream ? own->stream->given.load() : 0;
  return ACL_SUCCESS;
}
aclError aclrtResetEvent(aclrtEvent event, aclrtStream) { *static_cast<Event *>(event) = Event(); return ACL_SUCCESS; }
// The stream waits when it comes to that, not the caller: a stream beside the one that reads may wait for a collective without
// the reader being any safer.
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event) {
  auto *own = static_cast<Event *>(event);
  const auto wait = [from = own->stream, place = own->place] { return work_until(from, place); };
  return give(stream, Piece{wait, own->stream, own->place}, nullptr);
}
aclError aclrtSynchronizeEvent(aclrtEvent event) {
  auto *own = static_cast<Event *>(event);
  return work_until(own->stream, own->place);
}
aclError aclrtSynchronizeEventWithTimeout(aclrtEvent event, int32_t) { return aclrtSynchronizeEvent(event); }
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status) {
  auto *own = static_cast<Event *>(event);
  const bool complete = own->stream == nullptr || own->stream->done.load() >= own->place;
  *status = complete ? ACL_EVENT_RECORDED_STATUS_COMPLETE : ACL_EVENT_RECORDED_STATUS_NOT_READY;
  return ACL_SUCCESS;
}
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus *status) {
  *status = ACL_EVENT_WAIT_STATUS_COMPLETE;
  return ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float *elapsed, aclrtEvent start, aclrtEvent end) {
  *elapsed = static_cast<float>(static_cast<Event *>(end)->time - static_cast<Event *>(start)->time);
  return ACL_SUCCESS;
}
aclError aclrtEventGetTimestamp(aclrtEvent event, uint64_t *microseconds) {
  *microseconds = static_cast<uint64_t>(static_cast<Event *>(event)->time * 1e3);
  return ACL_SUCCESS;
}

}  // extern "C"
