// The two aclnn operators that torch_npu's own C++ calls around the dispatcher (copies between strided tensors, and padding
// before a gather), with the descriptors that they take. All others do nothing; kernels.py and fallback.py compute.
#include <cstdio>
#include <cstring>
#include <vector>

#include "runtime.h"

// The names are those of the C interface, which the wheel's headers declare without a body.
struct aclTensor {
  std::vector<int64_t> size, stride;
  aclDataType type;
  char *data;
};
struct aclIntArray {
  std::vector<int64_t> values;
};

namespace {

size_t bytes_of(aclDataType type) {
  switch (type) {
    case ACL_INT8: case ACL_UINT8: case ACL_BOOL: return 1;
    case ACL_FLOAT16: case ACL_BF16: case ACL_INT16: case ACL_UINT16: return 2;
    case ACL_FLOAT: case ACL_INT32: case ACL_UINT32: return 4;
    case ACL_DOUBLE: case ACL_INT64: case ACL_UINT64: case ACL_COMPLEX64: return 8;
    case ACL_COMPLEX128: return 16;
    default: return 0;
  }
}

// from, broadcast, into to.
void copy(const aclTensor *to, const aclTensor *from, size_t dim, char *out, const char *in) {
  const size_t unit = bytes_of(to->type);
  if (dim == to->size.size()) {
    memcpy(out, in, unit);
    return;
  }
  const size_t missing = to->size.size() - from->size.size();
  const bool stays = dim < missing || from->size[dim - missing] == 1;
  const int64_t step = stays ? 0 : from->stride[dim - missing];
  for (int64_t i = 0; i < to->size[dim]; ++i)
    copy(to, from, dim + 1, out + i * to->stride[dim] * static_cast<int64_t>(unit), in + i * step * static_cast<int64_t>(unit));
}

using Work = std::function<void()>;

int run(void *executor, aclrtStream stream) {
  auto *work = static_cast<Work *>(executor);
  const int error = sim::finish(stream);
  if (!error) (*work)();
  delete work;
  return error;
}

int refuse(const char *why) {
  sim::say("%s", why);
  return 161002;  // aclnn's code for wrong parameters
}

}  // namespace

extern "C" {

aclTensor *aclCreateTensor(const int64_t *size, uint64_t dims, aclDataType type, const int64_t *stride, int64_t offset,
                           aclFormat, const int64_t *, uint64_t, void *data) {
  auto *tensor = new aclTensor;
  tensor->size.assign(size, size + dims);
  if (stride) tensor->stride.assign(stride, stride + dims);
  tensor->type = type;
  tensor->data = static_cast<char *>(data) + offset * static_cast<int64_t>(bytes_of(type));
  return tensor;
}
int aclDestroyTensor(const aclTensor *tensor) { delete tensor; return 0; }
aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t count) { return new aclIntArray{{values, values + count}}; }
int aclDestroyIntArray(const aclIntArray *array) { delete array; return 0; }

// The first phase checks, the second computes, in its stream's turn. The executor links the two; it copies the descriptors,
// which are gone by then.
int aclnnInplaceCopyGetWorkspaceSize(aclTensor *to, const aclTensor *from, uint64_t *workspace, void **executor) {
  *workspace = 0;
  if (to->type != from->type || !bytes_of(to->type) || from->size.size() > to->size.size())
    return refuse("aclnnInplaceCopy is modelled between equal, sized types alone");
  *executor = new Work([to = *to, from = *from] { copy(&to, &from, 0, to.data, from.data); });
  return 0;
}
int aclnnInplaceCopy(void *, uint64_t, void *executor, aclrtStream stream) { return run(executor, stream); }

// As torch_npu uses it: [1, n] -> [1, n + p], zeros behind.
int aclnnConstantPadNdGetWorkspaceSize(const aclTensor *in, const aclIntArray *, const void *, aclTensor *out,
                                       uint64_t *workspace, void **executor) {
  *workspace = 0;
  if (!bytes_of(in->type) || out->size.back() < in->size.back())
    return refuse("aclnnConstantPadNd is modelled for padding behind one row alone");
  *executor = new Work([in = *in, out = *out] {
    const int64_t unit = static_cast<int64_t>(bytes_of(in.type)), had = in.size.back(), has = out.size.back();
    for (int64_t i = 0; i < had; ++i) memcpy(out.data + i * unit, in.data + i * in.stride.back() * unit, unit);
    memset(out.data + had * unit, 0, (has - had) * unit);
  });
  return 0;
}
int aclnnConstantPadNd(void *, uint64_t, void *executor, aclrtStream stream) { return run(executor, stream); }

}  // extern "C"
