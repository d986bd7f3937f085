// A build of torch without CUDA refuses to differentiate tensors of device "cuda", even tensors that hold no numbers, and
// so does a CUDA build from 2.14 on where there is no GPU. A guard and hooks that do nothing let them through. Registered
// before torch's own registration looks for hooks, under the class name that torch asks its registry for, and preferred to
// the hooks that a CUDA build brings.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;

Device only_device() { return Device(DeviceType::CUDA, 0); }
Stream only_stream() { return Stream(Stream::DEFAULT, only_device()); }

struct IdleGuard final : c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> {
  Device getDevice() const override { return only_device(); }
  Device exchangeDevice(Device) const override { return only_device(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Stream getStream(Device) const noexcept override { return only_stream(); }
  Stream exchangeStream(Stream) const noexcept override { return only_stream(); }
};

const IdleGuard guard;
const c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, &guard);

struct CUDAHooks : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  int getNumGPUs() const override { return 1; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

namespace at {
using ::CUDAHooks;
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}  // namespace at
