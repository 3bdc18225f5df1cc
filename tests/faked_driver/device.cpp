// A device of torch's that is no CPU but lives in host memory: autograd runs its nodes on a thread of its own, tensors
// on it and on the CPU do not mix, and freed memory is poisoned. Every operator runs as the CPU's, on aliases.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/Functions.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

using c10::DeviceType;
const at::Device OTHER(DeviceType::CUDA, 0);
thread_local c10::DeviceIndex current_device = 0;
std::atomic<int64_t> limit{INT64_MAX}, allocated{0}, peak{0};
std::atomic<void (*)(int64_t)> refused{nullptr};  // is told, as observers of CUDA's allocator are

struct Block { void* data; size_t size; };

void release(void* context) {
    auto* block = static_cast<Block*>(context);
    std::memset(block->data, 0xFF, block->size);
    std::free(block->data);
    allocated -= block->size;
    delete block;
}

struct Allocator final : c10::Allocator {
    c10::DataPtr allocate(size_t size) override {
        if (!size) return {nullptr, nullptr, nullptr, OTHER};
        if (allocated + (int64_t)size > limit) {
            if (auto told = refused.load()) told(size);
            TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size, " bytes");
        }
        auto* block = new Block{std::aligned_alloc(512, (size + 511) / 512 * 512), size};
        std::memset(block->data, 0xFF, size);
        allocated += size;
        peak = std::max(peak.load(), allocated.load());
        return {block->data, block, &release, OTHER};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t count) const override { std::memcpy(to, from, count); }
};
Allocator allocator;
REGISTER_ALLOCATOR(DeviceType::CUDA, &allocator)

struct Guard final : c10::impl::DeviceGuardImplInterface {
    DeviceType type() const override { return DeviceType::CUDA; }
    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }
    c10::Device getDevice() const override { return {DeviceType::CUDA, current_device}; }
    void setDevice(c10::Device device) const override { current_device = device.index() < 0 ? 0 : device.index(); }
    void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
    c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
    c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
    c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override {}
    void synchronizeEvent(void*) const override {}
    void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
    explicit Hooks(at::CUDAHooksArgs) {}
    void init() const override {}
    c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(DeviceType::CPU); }
    bool hasCUDA() const override { return true; }
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
    c10::DeviceIndex deviceCount() const override { return 1; }
    c10::DeviceIndex getCurrentDevice() const override { return 0; }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS(CUDAHooksRegistry, "CUDAHooks", Hooks)

at::Tensor here(const at::Tensor& there) {  // the same memory, as the CPU's
    if (!there.defined() || there.device().type() != DeviceType::CUDA) return there;
    auto options = there.options().device(at::kCPU).requires_grad(false);
    auto found = there.numel() == 0 ? at::empty(there.sizes(), options)
                                    : at::from_blob(there.data_ptr(), there.sizes(), there.strides(), options);
    if (there.is_conj()) found._set_conj(true);
    if (there.is_neg()) found._set_neg(true);
    return found;
}

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
    return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
    return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                             c10::dtype_or_default(dtype));
}

at::Tensor there_of(const at::Tensor& made) {
    auto found = empty_strided(made.sizes(), made.strides(), made.scalar_type(), {}, {}, {});
    if (made.numel()) here(found).copy_(made.resolve_conj().resolve_neg());
    return found;
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from, bool) {
    here(to).copy_(here(from));
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
    to.resize_(self.sizes());
    here(to).copy_(here(self));
    return to;
}

const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef sizes, std::optional<at::MemoryFormat>) {
    auto size = C10_AS_INTARRAYREF_SLOW(sizes);
    auto* impl = self.unsafeGetTensorImpl();
    size_t wanted = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
    if (self.storage().nbytes() < wanted) {
        auto memory = allocator.allocate(wanted);
        if (self.storage().nbytes()) std::memcpy(memory.get(), self.storage().data(), self.storage().nbytes());
        self.storage().unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(memory));
        self.storage().unsafeGetStorageImpl()->set_nbytes(wanted);
    }
    impl->set_sizes_contiguous(size);
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
    self.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    return self;
}

bool may_mix(const std::string& name) {
    return name.find("index") != std::string::npos || name.find("copy") != std::string::npos || name == "aten::embedding";
}

// What a kernel of CUDA's does, but here and now: tensors of the CPU are refused, unless they are numbers.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    const auto& schema = op.schema();
    const size_t count = schema.arguments().size(), begin = stack->size() - count;
    std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
    bool any_there = false;
    auto convert = [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.device().is_cpu() && tensor.dim() > 0 && !may_mix(schema.name()))
            TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ",
                        OTHER, " and cpu! (", schema.name(), ")");
        any_there |= tensor.defined() && tensor.device() == OTHER;
        return here(tensor);
    };
    for (size_t i = 0; i < count; i++) {
        auto& value = (*stack)[begin + i];
        if (value.isTensor()) {
            value = convert(value.toTensor());
        } else if (value.isTensorList()) {
            std::vector<at::Tensor> tensors;
            for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(convert(tensor));
            value = c10::List<at::Tensor>(tensors);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> tensors;
            for (std::optional<at::Tensor> tensor : value.toOptionalTensorList())
                tensors.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor)) : std::nullopt);
            value = tensors;
        } else if (value.isDevice() && value.toDevice().type() == DeviceType::CUDA) {
            value = at::Device(at::kCPU);
        }
    }
    std::vector<c10::IValue> converted(stack->begin() + begin, stack->end());
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    for (size_t i = 0; i < count; i++) {  // what was written by resizing
        if (given[i].isTensor() && given[i].toTensor().defined() && given[i].toTensor().device() == OTHER &&
            schema.arguments()[i].alias_info() && schema.arguments()[i].alias_info()->isWrite()) {
            const auto &to = given[i].toTensor(), &from = converted[i].toTensor();
            if (to.sizes() != from.sizes()) to.resize_(from.sizes());
            if (from.numel() && to.data_ptr() != from.data_ptr()) here(to).copy_(from);
        }
    }
    const size_t results = schema.returns().size(), first = stack->size() - results;
    for (size_t r = 0; r < results; r++) {
        auto& value = (*stack)[first + r];
        const auto* alias = schema.returns()[r].alias_info();
        bool found = false;
        if (alias && alias->isWrite() && value.isTensor()) {
            for (size_t i = 0; i < count && !found; i++)
                if (given[i].isTensor() && converted[i].toTensor().is_same(value.toTensor())) value = given[i], found = true;
        }
        if (found) continue;
        if (value.isTensor() && value.toTensor().defined()) {
            const auto made = value.toTensor();
            bool aliases = alias && !alias->isWrite();
            TORCH_CHECK(!aliases || made.numel() == 0, "a view that the other device does not know: ", schema.name());
            value = there_of(made);
        } else if (value.isTensorList()) {
            c10::List<at::Tensor> tensors;
            for (const at::Tensor& tensor : value.toTensorList()) tensors.push_back(there_of(tensor));
            value = tensors;
        }
    }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
    m.impl("empty.memory_format", &empty_memory_format);
    m.impl("empty_strided", &empty_strided);
    m.impl("copy_", &copy_);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("resize_", &resize_);
    m.impl("as_strided", &at::native::as_strided_tensorimpl);
    m.impl("view", &at::native::view);
    m.impl("_reshape_alias", &at::native::_reshape_alias);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("set_.source_Tensor", static_cast<at::Tensor& (*)(at::Tensor&, const at::Tensor&)>(&at::native::set_tensor_));
    m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
}

}  // namespace

extern "C" void faked_limit(int64_t bytes) { limit = bytes; }
extern "C" void faked_observe(void (*told)(int64_t)) { refused = told; }
extern "C" int64_t faked_allocated() { return allocated; }
extern "C" int64_t faked_peak() { return peak; }
extern "C" void faked_reset_peak() { peak = allocated.load(); }
