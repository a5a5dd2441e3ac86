// The pretend HCCL: ranks are processes of one machine and exchange through files in SIM_HCCL_FOLDER. Each call shows its
// signature to the other ranks, and a difference is an error that names both: real HCCL would hang, or worse.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace {

constexpr uint32_t kMaxRanks = 256;
using Blob = std::vector<char>;
using Blobs = std::vector<Blob>;  // by rank

struct Progress {
  std::atomic<uint64_t> step[kMaxRanks];  // barriers that each rank has reached
  std::atomic<bool> wanted[kMaxRanks];    // another rank has been waiting for this one
};

// A collective that a stream has been given in lazy mode.
struct Launched {
  aclrtStream stream;
  uint64_t place;
};

struct Communicator {
  std::string id, name;
  uint32_t size = 0, rank = 0;
  uint64_t step = 0;
  Progress *progress = nullptr;
  std::map<uint32_t, uint64_t> sent, received;  // point to point, by peer
  std::mutex mutex;                             // of `launched`
  std::deque<Launched> launched;                // the undone ones, and some that are done
};

// What all ranks must agree on.
struct Signature {
  char operation[24];
  int32_t type, reduction, root;
  uint64_t count;
};

struct TypeInfo {
  const char *name;
  size_t bytes;
};

TypeInfo type_info(int32_t type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8: return {"int8", 1};
    case HCCL_DATA_TYPE_INT16: return {"int16", 2};
    case HCCL_DATA_TYPE_INT32: return {"int32", 4};
    case HCCL_DATA_TYPE_FP16: return {"fp16", 2};
    case HCCL_DATA_TYPE_FP32: return {"fp32", 4};
    case HCCL_DATA_TYPE_INT64: return {"int64", 8};
    case HCCL_DATA_TYPE_UINT64: return {"uint64", 8};
    case HCCL_DATA_TYPE_UINT8: return {"uint8", 1};
    case HCCL_DATA_TYPE_UINT16: return {"uint16", 2};
    case HCCL_DATA_TYPE_UINT32: return {"uint32", 4};
    case HCCL_DATA_TYPE_FP64: return {"fp64", 8};
    case HCCL_DATA_TYPE_BFP16: return {"bf16", 2};
    default: return {"a type without a size here", 0};
  }
}

size_t bytes_of(int32_t type) { return type_info(type).bytes; }

std::string file(const Communicator *group, const std::string &what) {
  const char *folder = getenv("SIM_HCCL_FOLDER");
  return std::string(folder ? folder : "/dev/shm") + "/sim-hccl-" + group->id + "-" + what;
}

// Wait for the other ranks. Those that `late` still names after the patience of SIM_LAZY_PATIENCE are asked to go on: see
// `go_on_when_wanted`.
template <class Condition, class Late>
bool wait_for(Communicator *group, Condition condition, Late late) {
  const double start = sim::milliseconds(), deadline = start + 1e3 * sim::setting("SIM_HCCL_TIMEOUT", 60);
  const double patience = static_cast<double>(sim::setting("SIM_LAZY_PATIENCE", 2000));
  double next_asking = start + patience;
  for (int tries = 0; !condition(); ++tries) {
    const double now = sim::milliseconds();
    if (now > deadline) return false;
    if (sim::lazy() && now > next_asking) {
      for (uint32_t rank = 0; rank < group->size; ++rank)
        if (late(rank)) group->progress->wanted[rank] = true;
      next_asking = now + patience;
    }
    tries < 20 ? static_cast<void>(sched_yield()) : static_cast<void>(usleep(50));
  }
  return true;
}

bool barrier(Communicator *group) {
  const uint64_t step = ++group->step;
  group->progress->step[group->rank] = step;
  const auto late = [&](uint32_t rank) { return group->progress->step[rank].load() < step; };
  const auto all_here = [&] {
    for (uint32_t rank = 0; rank < group->size; ++rank)
      if (late(rank)) return false;
    return true;
  };
  return wait_for(group, all_here, late);
}

bool write_all(int descriptor, const void *data, size_t size) {
  for (size_t done = 0; done < size;) {
    const ssize_t count = write(descriptor, static_cast<const char *>(data) + done, size - done);
    if (count <= 0) return false;
    done += count;
  }
  return true;
}

bool put(const std::string &path, const Signature &signature, const void *data, size_t size) {
  const std::string unfinished = path + ".tmp";
  const int descriptor = open(unfinished.c_str(), O_CREAT | O_TRUNC | O_WRONLY, 0600);
  if (descriptor < 0) return false;
  const bool good = write_all(descriptor, &signature, sizeof signature) && write_all(descriptor, data, size);
  close(descriptor);
  return good && rename(unfinished.c_str(), path.c_str()) == 0;
}

bool get(const std::string &path, Signature &signature, Blob &data) {
  const int descriptor = open(path.c_str(), O_RDONLY);
  struct stat status;
  if (descriptor < 0 || fstat(descriptor, &status) || status.st_size < static_cast<off_t>(sizeof signature)) return false;
  Blob all(status.st_size);
  size_t done = 0;
  while (done < all.size()) {
    const ssize_t count = read(descriptor, all.data() + done, all.size() - done);
    if (count <= 0) break;
    done += count;
  }
  close(descriptor);
  memcpy(&signature, all.data(), sizeof signature);
  data.assign(all.begin() + sizeof signature, all.end());
  return done == all.size();
}

Signature signature_of(const char *operation, int32_t type, uint64_t count, int32_t reduction = -1, int32_t root = -1) {
  Signature signature;
  memset(&signature, 0, sizeof signature);
  snprintf(signature.operation, sizeof signature.operation, "%s", operation);
  signature.type = type;
  signature.reduction = reduction;
  signature.root = root;
  signature.count = count;
  return signature;
}

std::string text(const Signature &s) {
  char line[160];
  snprintf(line, sizeof line, "%s of %lu %s (reduction %d, root %d)", s.operation, static_cast<unsigned long>(s.count),
           type_info(s.type).name, s.reduction, s.root);
  return line;
}

HcclResult no_file(const Communicator *group, const Signature &mine) {
  sim::say("rank %u of %u: a file of %s cannot be written or read: %s", group->rank, group->size, text(mine).c_str(),
          strerror(errno));
  return HCCL_E_SYSCALL;
}

// Show this rank's part to the group; afterwards all[r] is rank r's part.
HcclResult exchange(Communicator *group, const Signature &mine, const void *data, size_t size, Blobs &all) {
  if (!bytes_of(mine.type)) {
    sim::say("%s: the type %d is not supported", mine.operation, mine.type);
    return HCCL_E_NOT_SUPPORT;
  }
  const std::string step = std::to_string(group->step);
  if (!put(file(group, step + "-" + std::to_string(group->rank)), mine, data, size)) return no_file(group, mine);
  if (!barrier(group)) {
    sim::say("rank %u of %u waited in vain for the others in %s", group->rank, group->size,
            text(mine).c_str());
    return HCCL_E_TIMEOUT;
  }
  HcclResult result = HCCL_SUCCESS;
  all.resize(group->size);
  for (uint32_t rank = 0; rank < group->size; ++rank) {
    Signature theirs;
    if (!get(file(group, step + "-" + std::to_string(rank)), theirs, all[rank])) return no_file(group, mine);
    if (memcmp(&theirs, &mine, sizeof mine)) {
      sim::say("ranks disagree: rank %u calls %s, rank %u calls %s", group->rank, text(mine).c_str(), rank,
              text(theirs).c_str());
      result = HCCL_E_PARA;
    }
  }
  if (!barrier(group)) {
    sim::say("rank %u of %u waited in vain for the others behind %s", group->rank, group->size, text(mine).c_str());
    return HCCL_E_TIMEOUT;
  }
  unlink(file(group, step + "-" + std::to_string(group->rank)).c_str());
  return result;
}

// ---- reductions, in the order of ranks

float from_half(uint16_t bits) {
  _Float16 half;
  memcpy(&half, &bits, sizeof half);
  return static_cast<float>(half);
}
uint16_t to_half(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  memcpy(&bits, &half, sizeof bits);
  return bits;
}
float from_bfloat(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}
uint16_t to_bfloat(float value) {
  if (std::isnan(value)) return 0x7FC0;
  uint32_t wide;
  memcpy(&wide, &value, sizeof wide);
  return static_cast<uint16_t>((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16);
}

template <class Value>
Value combine(Value left, Value right, int32_t reduction) {
  switch (reduction) {
    case HCCL_REDUCE_SUM: return left + right;
    case HCCL_REDUCE_PROD: return left * right;
    case HCCL_REDUCE_MAX: return left > right ? left : right;
    default: return left < right ? left : right;
  }
}

template <class Stored, class Value, class Load, class Store>
void reduce_as(char *out, const Blobs &all, size_t offset, uint64_t count, int32_t reduction, Load load, Store store) {
  for (uint64_t i = 0; i < count; ++i) {
    const auto at = [&](const Blob &blob) {
      Stored stored;
      memcpy(&stored, blob.data() + offset + i * sizeof stored, sizeof stored);
      return static_cast<Value>(load(stored));
    };
    Value value = at(all[0]);
    for (size_t rank = 1; rank < all.size(); ++rank) value = combine<Value>(value, at(all[rank]), reduction);
    const Stored stored = store(value);
    memcpy(out + i * sizeof stored, &stored, sizeof stored);
  }
}

template <class Value>
void reduce_plain(char *out, const Blobs &all, size_t offset, uint64_t count, int32_t reduction) {
  const auto same = [](Value value) { return value; };
  reduce_as<Value, Value>(out, all, offset, count, reduction, same, same);
}

// Which types may be reduced is torch_npu's own rule for Ascend910B: no fp64, nothing unsigned.
HcclResult reduce(void *out, const Blobs &all, size_t offset, uint64_t count, int32_t type, int32_t reduction) {
  char *bytes = static_cast<char *>(out);
  switch (type) {
    case HCCL_DATA_TYPE_INT8: reduce_plain<int8_t>(bytes, all, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT16: reduce_plain<int16_t>(bytes, all, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT32: reduce_plain<int32_t>(bytes, all, offset, count, reduction); break;
    case HCCL_DATA_TYPE_INT64: reduce_plain<int64_t>(bytes, all, offset, count, reduction); break;
    case HCCL_DATA_TYPE_FP32: reduce_plain<float>(bytes, all, offset, count, reduction); break;
    case HCCL_DATA_TYPE_FP16:
      reduce_as<uint16_t, float>(bytes, all, offset, count, reduction, from_half, to_half);
      break;
    case HCCL_DATA_TYPE_BFP16:
      reduce_as<uint16_t, float>(bytes, all, offset, count, reduction, from_bfloat, to_bfloat);
      break;
    default:
      sim::say("HCCL does not reduce %s", type_info(type).name);
      return HCCL_E_NOT_SUPPORT;
  }
  return HCCL_SUCCESS;
}

// ---- communicators

std::mutex communicators_mutex;
// Those of lazy mode. Never freed: what they launched may still come to be done, and the thread below outlives `main`.
std::vector<Communicator *> &communicators() {
  static auto *all = new std::vector<Communicator *>;
  return *all;
}

Communicator *of(HcclComm handle) { return static_cast<Communicator *>(handle); }

HcclResult give(HcclComm handle, aclrtStream stream, std::function<int()> work) {
  uint64_t place = 0;
  const int error = sim::give(stream, std::move(work), &place);
  if (place) {
    Communicator *group = of(handle);
    std::lock_guard<std::mutex> guard(group->mutex);
    auto &launched = group->launched;
    while (!launched.empty() && sim::is_done(launched.front().stream, launched.front().place)) launched.pop_front();
    launched.push_back({stream, place});
  }
  return static_cast<HcclResult>(error);
}

// Lazy mode: do all that this rank has launched in a group in which another rank has been waiting for it. Its host may be
// waiting for that rank in turn, which on a device would keep no collective from its end.
void go_on_when_wanted() {
  for (;; usleep(5000)) {
    std::vector<Communicator *> groups;
    {
      std::lock_guard<std::mutex> guard(communicators_mutex);
      groups = communicators();
    }
    for (Communicator *group : groups) {
      if (!group->progress->wanted[group->rank].exchange(false)) continue;
      std::vector<Launched> launched;
      {
        std::lock_guard<std::mutex> guard(group->mutex);
        launched.assign(group->launched.begin(), group->launched.end());
      }
      // A thread of its own: it may have to wait for ranks that wait for another group of this one.
      std::thread([launched] {
        for (const auto &one : launched) sim::finish_until(one.stream, one.place);
      }).detach();
    }
  }
}

HcclResult join(uint32_t size, const HcclRootInfo *root, uint32_t rank, HcclComm *out) {
  if (size > kMaxRanks) return HCCL_E_PARA;
  auto *group = new Communicator;
  group->id = root->internal;
  group->name = "sim_" + group->id;
  group->size = size;
  group->rank = rank;
  const int descriptor = open(file(group, "progress").c_str(), O_CREAT | O_RDWR, 0600);
  if (descriptor < 0 || ftruncate(descriptor, sizeof(Progress))) return HCCL_E_SYSCALL;
  void *shared = mmap(nullptr, sizeof(Progress), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  close(descriptor);
  if (shared == MAP_FAILED) return HCCL_E_SYSCALL;
  group->progress = static_cast<Progress *>(shared);
  *out = group;
  if (sim::lazy()) {
    std::lock_guard<std::mutex> guard(communicators_mutex);
    if (communicators().empty()) std::thread(go_on_when_wanted).detach();
    communicators().push_back(group);
  }
  return barrier(group) ? HCCL_SUCCESS : HCCL_E_TIMEOUT;
}

HcclResult send_now(const void *data, uint64_t count, int32_t type, uint32_t peer, Communicator *group) {
  const std::string path = file(group, "from" + std::to_string(group->rank) + "-to" + std::to_string(peer) + "-" +
                                           std::to_string(group->sent[peer]++));
  return put(path, signature_of("Send", type, count), data, count * bytes_of(type)) ? HCCL_SUCCESS : HCCL_E_SYSCALL;
}

HcclResult receive_now(void *data, uint64_t count, int32_t type, uint32_t peer, Communicator *group) {
  const std::string path = file(group, "from" + std::to_string(peer) + "-to" + std::to_string(group->rank) + "-" +
                                           std::to_string(group->received[peer]++));
  const auto sent = [&] { return access(path.c_str(), R_OK) == 0; };
  if (!wait_for(group, sent, [&](uint32_t rank) { return rank == peer; })) {
    sim::say("rank %u waited in vain for a Send of rank %u", group->rank, peer);
    return HCCL_E_TIMEOUT;
  }
  Signature theirs;
  Blob blob;
  if (!get(path, theirs, blob)) return HCCL_E_SYSCALL;
  unlink(path.c_str());
  if (theirs.count != count || theirs.type != type) {
    sim::say("rank %u receives %lu %s, but rank %u sends %s", group->rank,
            static_cast<unsigned long>(count), type_info(type).name, peer, text(theirs).c_str());
    return HCCL_E_PARA;
  }
  memcpy(data, blob.data(), blob.size());
  return HCCL_SUCCESS;
}

std::vector<uint64_t> numbers(const void *data, uint32_t size) {
  const auto *begin = static_cast<const uint64_t *>(data);
  return {begin, begin + size};
}

}  // namespace

extern "C" {

HcclResult HcclGetRootInfo(HcclRootInfo *root) {
  static std::atomic<int> next{0};
  snprintf(root->internal, sizeof root->internal, "%d-%d-%.0f", getpid(), next++, sim::milliseconds() * 1e3);
  return HCCL_SUCCESS;
}
HcclResult HcclCommInitRootInfo(uint32_t size, const HcclRootInfo *root, uint32_t rank, HcclComm *out) {
  return join(size, root, rank, out);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t size, const HcclRootInfo *root, uint32_t rank, const HcclCommConfig *,
                                      HcclComm *out) {
  return join(size, root, rank, out);
}
HcclResult HcclCommDestroy(HcclComm handle) {
  Communicator *group = of(handle);
  if (group->rank == 0) unlink(file(group, "progress").c_str());
  if (sim::lazy()) return HCCL_SUCCESS;
  munmap(group->progress, sizeof(Progress));
  delete group;
  return HCCL_SUCCESS;
}
HcclResult HcclGetCommName(HcclComm handle, char *name) {
  snprintf(name, COMM_NAME_MAX_LENGTH, "%s", of(handle)->name.c_str());
  return HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm handle, uint32_t *size) { *size = of(handle)->size; return HCCL_SUCCESS; }
HcclResult HcclGetRankId(HcclComm handle, uint32_t *rank) { *rank = of(handle)->rank; return HCCL_SUCCESS; }
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult *error) { *error = HCCL_SUCCESS; return HCCL_SUCCESS; }
const char *HcclGetErrorString(HcclResult result) {
  switch (result) {
    case HCCL_E_PARA: return "parameters differ between ranks";
    case HCCL_E_TIMEOUT: return "not all ranks came";
    case HCCL_E_NOT_SUPPORT: return "not supported";
    default: return "error";
  }
}
uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }
HcclResult HcclGroupStart() { return HCCL_SUCCESS; }
HcclResult HcclGroupEnd() { return HCCL_SUCCESS; }

HcclResult HcclAllReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp reduction,
                         HcclComm handle, aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  sim::hide(stream, receive, size, send, size);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    const auto mine = signature_of("AllReduce", type, count, reduction);
    if (const auto error = exchange(of(handle), mine, send, size, all)) return error;
    return reduce(receive, all, 0, count, type, reduction);
  });
}

HcclResult HcclReduce(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp reduction, uint32_t root,
                      HcclComm handle, aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  if (of(handle)->rank == root) sim::hide(stream, receive, size, send, size);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    const auto mine = signature_of("Reduce", type, count, reduction, static_cast<int32_t>(root));
    if (const auto error = exchange(of(handle), mine, send, size, all)) return error;
    return of(handle)->rank == root ? reduce(receive, all, 0, count, type, reduction) : HCCL_SUCCESS;
  });
}

HcclResult HcclReduceScatter(void *send, void *receive, uint64_t count, HcclDataType type, HcclReduceOp reduction,
                             HcclComm handle, aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  const uint32_t ranks = of(handle)->size;
  sim::hide(stream, receive, size, send, ranks * size);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    const auto mine = signature_of("ReduceScatter", type, count, reduction);
    if (const auto error = exchange(of(handle), mine, send, ranks * size, all)) return error;
    return reduce(receive, all, of(handle)->rank * size, count, type, reduction);
  });
}

HcclResult HcclBroadcast(void *data, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                         aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  const bool sends = of(handle)->rank == root;
  if (!sends) sim::hide(stream, data, size, nullptr, 0);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    const auto mine = signature_of("Broadcast", type, count, -1, static_cast<int32_t>(root));
    if (const auto error = exchange(of(handle), mine, data, sends ? size : 0, all)) return error;
    memcpy(data, all[root].data(), size);
    return HCCL_SUCCESS;
  });
}

HcclResult HcclScatter(void *send, void *receive, uint64_t count, HcclDataType type, uint32_t root, HcclComm handle,
                       aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  const bool sends = of(handle)->rank == root;
  sim::hide(stream, receive, size, send, sends ? size * of(handle)->size : 0);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    const auto mine = signature_of("Scatter", type, count, -1, static_cast<int32_t>(root));
    if (const auto error = exchange(of(handle), mine, send, sends ? size * of(handle)->size : 0, all)) return error;
    memcpy(receive, all[root].data() + of(handle)->rank * size, size);
    return HCCL_SUCCESS;
  });
}

HcclResult HcclAllGather(void *send, void *receive, uint64_t count, HcclDataType type, HcclComm handle,
                         aclrtStream stream) {
  const size_t size = count * bytes_of(type);
  sim::hide(stream, receive, size * of(handle)->size, send, size);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    if (const auto error = exchange(of(handle), signature_of("AllGather", type, count), send, size, all)) return error;
    for (uint32_t rank = 0; rank < of(handle)->size; ++rank)
      memcpy(static_cast<char *>(receive) + rank * size, all[rank].data(), size);
    return HCCL_SUCCESS;
  });
}

HcclResult HcclBarrier(HcclComm handle, aclrtStream stream) {
  return give(handle, stream, [=]() -> int {
    Blobs all;
    return exchange(of(handle), signature_of("Barrier", HCCL_DATA_TYPE_INT8, 0), nullptr, 0, all);
  });
}

HcclResult HcclAlltoAll(const void *send, uint64_t count, HcclDataType type, const void *receive, uint64_t, HcclDataType,
                        HcclComm handle, aclrtStream stream) {
  const size_t size = count * bytes_of(type), whole = size * of(handle)->size;
  sim::hide(stream, receive, whole, send, whole);
  return give(handle, stream, [=]() -> int {
    Blobs all;
    if (const auto error = exchange(of(handle), signature_of("AlltoAll", type, count), send, whole, all)) return error;
    for (uint32_t rank = 0; rank < of(handle)->size; ++rank)
      memcpy(static_cast<char *>(const_cast<void *>(receive)) + rank * size, all[rank].data() + of(handle)->rank * size, size);
    return HCCL_SUCCESS;
  });
}

// Each rank shows its counts, then its pieces one after the other.
HcclResult HcclAlltoAllV(const void *send, const void *send_counts, const void *send_offsets, HcclDataType type,
                         const void *receive, const void *receive_counts, const void *receive_offsets, HcclDataType,
                         HcclComm handle, aclrtStream stream) {
  const uint32_t ranks = of(handle)->size;
  const auto sent = numbers(send_counts, ranks), sent_at = numbers(send_offsets, ranks);
  const auto expected = numbers(receive_counts, ranks), expected_at = numbers(receive_offsets, ranks);
  const size_t unit = bytes_of(type);
  uint64_t read = 0;
  for (uint32_t rank = 0; rank < ranks; ++rank) read = std::max(read, sent_at[rank] + sent[rank]);
  char *out = static_cast<char *>(const_cast<void *>(receive));
  for (uint32_t rank = 0; rank < ranks; ++rank) sim::hide(stream, out + expected_at[rank] * unit, expected[rank] * unit, send, read * unit);
  return give(handle, stream, [=]() -> int {
    Communicator *group = of(handle);
    Blob mine(reinterpret_cast<const char *>(sent.data()), reinterpret_cast<const char *>(sent.data() + ranks));
    for (uint32_t rank = 0; rank < ranks; ++rank) {
      const char *piece = static_cast<const char *>(send) + sent_at[rank] * unit;
      mine.insert(mine.end(), piece, piece + sent[rank] * unit);
    }
    Blobs all;
    if (const auto error = exchange(group, signature_of("AlltoAllV", type, 0), mine.data(), mine.size(), all)) return error;
    for (uint32_t source = 0; source < ranks; ++source) {
      const auto counts = numbers(all[source].data(), ranks);
      if (counts[group->rank] != expected[source]) {
        sim::say("AlltoAllV: rank %u sends %lu elements to rank %u, which expects %lu", source,
                static_cast<unsigned long>(counts[group->rank]), group->rank, static_cast<unsigned long>(expected[source]));
        return HCCL_E_PARA;
      }
      uint64_t before = 0;
      for (uint32_t rank = 0; rank < group->rank; ++rank) before += counts[rank];
      memcpy(out + expected_at[source] * unit, all[source].data() + ranks * sizeof(uint64_t) + before * unit,
             counts[group->rank] * unit);
    }
    return HCCL_SUCCESS;
  });
}

HcclResult HcclSend(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream stream) {
  return give(handle, stream, [=]() -> int { return send_now(data, count, type, peer, of(handle)); });
}
HcclResult HcclRecv(void *data, uint64_t count, HcclDataType type, uint32_t peer, HcclComm handle, aclrtStream stream) {
  sim::hide(stream, data, count * bytes_of(type), nullptr, 0);
  return give(handle, stream, [=]() -> int { return receive_now(data, count, type, peer, of(handle)); });
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem *items, uint32_t count, HcclComm handle, aclrtStream stream) {
  const std::vector<HcclSendRecvItem> batch(items, items + count);
  for (const auto &item : batch)
    if (item.sendRecvType == HCCL_RECV) sim::hide(stream, item.buf, item.count * bytes_of(item.dataType), nullptr, 0);
  return give(handle, stream, [=]() -> int {
    for (const auto &item : batch)
      if (item.sendRecvType == HCCL_SEND)
        if (const auto error = send_now(item.buf, item.count, item.dataType, item.remoteRank, of(handle))) return error;
    for (const auto &item : batch)
      if (item.sendRecvType == HCCL_RECV)
        if (const auto error = receive_now(item.buf, item.count, item.dataType, item.remoteRank, of(handle))) return error;
    return HCCL_SUCCESS;
  });
}

}  // extern "C"
