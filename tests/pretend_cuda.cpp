// CUDA devices that do not exist: tensors whose memory is the host's, for a build of torch without CUDA.
//
// Every operator runs on the CPU, on the same memory, so numbers are right. What a GPU is strict about is checked here:
// tensors of one operation are on one device. What makes the host wait for a GPU is counted. Streams are not imitated:
// everything is done when the call returns. The devices' number is PRETEND_CUDA_DEVICES.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/strides.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

namespace {

using namespace c10;

const DeviceIndex devices = std::getenv("PRETEND_CUDA_DEVICES") ? std::atoi(std::getenv("PRETEND_CUDA_DEVICES")) : 2;
thread_local DeviceIndex current = 0;

// -- what made the host wait ---------------------------------------------------------------------------------------

std::mutex lock;
std::map<std::string, int64_t> waits;

std::atomic<bool> counting{true};

void waited(const std::string& why) {
  if (!counting) return;
  std::lock_guard<std::mutex> guard(lock);
  ++waits[why];
}

// -- memory --------------------------------------------------------------------------------------------------------

struct DeviceMemory final : Allocator {
  DataPtr allocate(size_t n) override {
    void* data = n ? std::aligned_alloc(64, (n + 63) / 64 * 64) : nullptr;
    return {data, data, &std::free, Device(kCUDA, current)};
  }
  DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
} device_memory;

std::set<std::pair<const char*, const char*>> pinned;  // [begin, end)

struct PinnedMemory final : Allocator {
  DataPtr allocate(size_t n) override {
    auto* data = static_cast<char*>(std::aligned_alloc(64, (n + 64) / 64 * 64));
    std::lock_guard<std::mutex> guard(lock);
    pinned.insert({data, data + n});
    return {data, data, &release, Device(kCPU)};
  }
  DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { default_copy_data(to, from, n); }
  static void release(void* data) {
    std::lock_guard<std::mutex> guard(lock);
    pinned.erase(pinned.lower_bound({static_cast<const char*>(data), nullptr}));
    std::free(data);
  }
} pinned_memory;

bool is_pinned(const void* data) {
  auto* at = static_cast<const char*>(data);
  std::lock_guard<std::mutex> guard(lock);
  for (auto& [begin, end] : pinned)
    if (begin <= at && at < end) return true;
  return false;
}

// -- devices -------------------------------------------------------------------------------------------------------

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kCUDA; }
  Device exchangeDevice(Device d) const override {
    Device before(kCUDA, current);
    current = d.index();
    return before;
  }
  Device getDevice() const override { return Device(kCUDA, current); }
  void setDevice(Device d) const override { current = d.index(); }
  void uncheckedSetDevice(Device d) const noexcept override { current = d.index(); }
  Stream getStream(Device d) const override {
    return Stream(Stream::DEFAULT, Device(kCUDA, d.index() < 0 ? current : d.index()));
  }
  Stream getDefaultStream(Device d) const override { return getStream(d); }
  Stream getNewStream(Device d, int = 0) const override { return getStream(d); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getStream(d); }
  Stream exchangeStream(Stream s) const override { return getStream(s.device()); }
  DeviceIndex deviceCount() const noexcept override { return devices; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override { waited("synchronize"); }
  void synchronizeDevice(const DeviceIndex) const override { waited("synchronize"); }
};
impl::DeviceGuardImplRegistrar registrar(kCUDA, new Guard());

// -- operators -----------------------------------------------------------------------------------------------------

// The same memory as a tensor on the CPU. The storage does not own it: `t` outlives the operator.
at::Tensor on_host(const at::Tensor& t) {
  if (!t.defined() || !t.is_cuda()) return t;
  auto& storage = t.storage();
  DataPtr memory(const_cast<void*>(storage.data()), kCPU);
  Storage same(Storage::use_byte_size_t(), storage.nbytes(), std::move(memory), GetCPUAllocator(), true);
  auto alias = at::detail::make_tensor<TensorImpl>(std::move(same), DispatchKeySet(DispatchKey::CPU), t.dtype());
  // Of strides that mean the same, those without a choice: the CPU's convolution takes 1x1 weights for channels_last.
  const auto plain = c10::contiguous_strides(t.sizes());
  const auto strides = t.is_contiguous() ? IntArrayRef(plain) : t.strides();
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), strides, t.storage_offset());
  return alias;
}

at::Tensor with_storage(Storage storage, const at::Tensor& like) {
  auto t = at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CUDA), like.dtype());
  t.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return t;
}

// The memory of a result of the CPU, owned, as memory of `device`.
DataPtr take(const at::Tensor& host, Device device) {
  auto* owner = new Storage(host.storage());
  auto release = [](void* storage) { delete static_cast<Storage*>(storage); };
  return DataPtr(const_cast<void*>(owner->data()), owner, release, device);
}

at::Tensor on_device(const at::Tensor& host, Device device) {
  const auto size = host.storage().nbytes();
  return with_storage(Storage(Storage::use_byte_size_t(), size, take(host, device), &device_memory, true), host);
}

// Operators whose result, or whose result's size, the host waits for.
const std::set<std::string> waiting = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2"};
// Operators that take tensors of several devices on a GPU too.
const std::set<std::string> mixing = {"aten::index", "aten::index_put_", "aten::_index_put_impl_"};

// Each device has random numbers of its own. Operators draw from the host's generator, which is lent a device's state.
std::recursive_mutex drawing;

at::Generator& generator_of(DeviceIndex index) {
  static std::map<DeviceIndex, at::Generator> generators;
  auto found = generators.find(index);
  if (found == generators.end()) found = generators.emplace(index, at::detail::createCPUGenerator(67280421310721)).first;
  return found->second;
}

struct Lent {
  std::unique_lock<std::recursive_mutex> guard{drawing};
  at::Generator host = at::detail::getDefaultCPUGenerator(), own;
  at::Tensor before;

  explicit Lent(Device device) : own(generator_of(device.has_index() ? device.index() : current)), before(host.get_state()) {
    host.set_state(own.get_state());
  }
  ~Lent() {
    own.set_state(host.get_state());
    host.set_state(before);
  }
};

struct Call {
  std::string name;
  std::optional<Device> device;
  std::vector<std::pair<at::Tensor, at::Tensor>> aliases;  // (on the device, on the host)

  at::Tensor convert(const at::Tensor& t, bool check) {
    if (!t.defined()) return t;
    if (check && t.dim() > 0) {
      TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least "
                  "two devices, ", *device, " and ", t.device(), "! (", name, ")");
      device = t.device();
    } else if (t.is_cuda() && !device) {
      device = t.device();
    }
    if (!t.is_cuda()) return t;
    for (auto& [original, alias] : aliases)
      if (original.is_same(t)) return alias;
    aliases.emplace_back(t, on_host(t));
    return aliases.back().second;
  }

  // Arguments for results (out=) may have been resized.
  void take_resized() {
    for (auto& [original, alias] : aliases) {
      if (alias.storage().data() != original.storage().data()) {
        auto* storage = original.storage().unsafeGetStorageImpl();
        storage->set_data_ptr(take(alias, original.device()));
        storage->set_nbytes(alias.storage().nbytes());
      }
      if (alias.sizes() != original.sizes())
        original.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides(), alias.storage_offset());
    }
  }

  at::Tensor back(const at::Tensor& result) {
    if (!result.defined()) return result;
    for (auto& [original, alias] : aliases) {
      if (alias.is_same(result)) return original;
      if (alias.has_storage() && result.storage().is_alias_of(alias.storage()))
        return with_storage(original.storage(), result);
    }
    return on_device(result, *device);
  }
};

void run_on_host(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  Call call{op.schema().name(), std::nullopt, {}};
  if (waiting.count(call.name)) waited(call.name.substr(6));
  // Operators over lists fall back to one call for each tensor where devices differ.
  const bool check = !mixing.count(call.name) && call.name.rfind("aten::_foreach_", 0) != 0;
  const auto arguments = op.schema().arguments().size();
  const auto first = stack->size() - arguments;
  for (size_t i = 0; i < arguments; ++i) {
    IValue& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = call.convert(value.toTensor(), check);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> converted;
      for (const at::Tensor& t : value.toTensorVector()) converted.push_back(call.convert(t, check));
      value = List<at::Tensor>(converted);
    } else if (value.isOptionalTensorList()) {
      List<std::optional<at::Tensor>> converted;
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList().vec())
        converted.push_back(t ? std::optional<at::Tensor>(call.convert(*t, check)) : t);
      value = converted;
    } else if (value.isDevice()) {
      if (!call.device) call.device = value.toDevice();
      value = Device(kCPU);
    }
  }
  {
    std::optional<Lent> lent;
    if (call.device && call.device->is_cuda() && op.hasTag(at::Tag::nondeterministic_seeded))
      lent.emplace(*call.device);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  }
  call.take_resized();
  const auto results = op.schema().returns().size();
  for (size_t i = stack->size() - results; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = call.back(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> converted;
      for (const at::Tensor& t : value.toTensorVector()) converted.push_back(call.back(t));
      value = List<at::Tensor>(converted);
    }
  }
}

at::Tensor empty(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<MemoryFormat> format) {
  DeviceGuard guard(device_or_default(device));
  return at::detail::empty_generic(
      size, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype), format);
}

at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<Layout>, std::optional<Device> device, std::optional<bool>) {
  DeviceGuard guard(device_or_default(device));
  return at::detail::empty_strided_generic(
      size, stride, &device_memory, DispatchKeySet(DispatchKey::CUDA), dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() && self.device() != source.device() && !(self.is_cuda() && source.is_cuda())) {
    const auto& host = self.is_cuda() ? source : self;
    if (!non_blocking || !is_pinned(host.storage().data())) waited(self.is_cuda() ? "copy to device" : "copy to host");
  }
  on_host(self).copy_(on_host(source));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, source, offset, size, stride);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

}  // namespace

namespace at {

struct CUDAHooks : CUDAHooksInterface {  // torch looks for this name
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return devices; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return devices; }
  long versionCuDNN() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex d) const override { current = d; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { return std::exchange(current, d); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace c10d {

// DistributedDataParallel logs times, and wants a clock for each kind of device.
struct NoTimer final : Timer {
  explicit NoTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event, Event) override { return std::nullopt; }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, NoTimer)

}  // namespace c10d

// -- for Python, through ctypes ------------------------------------------------------------------------------------

extern "C" {
int pretend_current() { return current; }
void pretend_set_current(int index) { current = static_cast<DeviceIndex>(index); }
void pretend_seed(int index, uint64_t seed) {
  std::lock_guard<std::recursive_mutex> guard(drawing);
  generator_of(index).set_current_seed(seed);
}
// Bytes of a generator's state.
int pretend_state_size() { return generator_of(0).get_state().numel(); }
void pretend_get_state(int index, void* state) {
  std::lock_guard<std::recursive_mutex> guard(drawing);
  const at::Tensor own = generator_of(index).get_state();
  std::memcpy(state, own.const_data_ptr(), own.numel());
}
void pretend_set_state(int index, const void* state) {
  std::lock_guard<std::recursive_mutex> guard(drawing);
  at::Tensor own = generator_of(index).get_state();
  std::memcpy(own.mutable_data_ptr(), state, own.numel());
  generator_of(index).set_state(own);
}
void pretend_count(int yes) { counting = yes; }
void pretend_waited(const char* why) { waited(why); }
// "why count\n" for each reason since the last call.
const char* pretend_take_waits() {
  static thread_local std::string text;
  std::lock_guard<std::mutex> guard(lock);
  text.clear();
  for (auto& [why, count] : waits) text += why + "\t" + std::to_string(count) + "\n";
  waits.clear();
  return text.c_str();
}
}
