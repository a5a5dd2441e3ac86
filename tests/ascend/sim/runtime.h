// What the parts of the pretend CANN share. Own code, compiled against the headers that the torch_npu wheel ships, so that
// a function whose signature has changed is a compiler's error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>

#include "acl/acl.h"
#include "acl/acl_op_compiler.h"

namespace sim {

// An integer from the environment.
inline long setting(const char *name, long otherwise) {
  const char *text = getenv(name);
  return text ? atol(text) : otherwise;
}

// With SIM_LAZY_COLLECTIVES=1 a collective does its work when something waits for it, not when it is launched. "Something"
// is the host, an operator on a stream that was told to wait, or another rank that has been waiting in vain for a while: a
// device goes on with what it was given, whatever its host waits for.
inline bool lazy() {
  static const bool value = setting("SIM_LAZY_COLLECTIVES", 0) != 0;
  return value;
}

// Run a piece of a stream's work: now, or in lazy mode when the stream is waited for. Nonzero: the work's error.
// place: where it stands in the stream's work; 0 when it has been done.
int give(aclrtStream stream, std::function<int()> work, uint64_t *place = nullptr);

// Do all that the stream has been given. Nonzero: the first error.
int finish(aclrtStream stream);

// Do what the stream has been given up to a place; and whether that is done.
int finish_until(aclrtStream stream, uint64_t place);
bool is_done(aclrtStream stream, uint64_t place);

// In lazy mode, fill what a collective on the stream will write with 0xFF bytes (NaN, or -1), except where it overlaps what it
// reads: collectives in place are legal. What the stream was told to wait for comes first: the memory may be that of a buffer
// which an earlier collective still sends, freed since the program has waited for that one.
void hide(aclrtStream stream, const void *written, size_t written_bytes, const void *read, size_t read_bytes);

// Print an error, and keep it for torch_npu to put into its exception.
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

// Milliseconds on the monotonic clock.
double milliseconds();

}  // namespace sim
