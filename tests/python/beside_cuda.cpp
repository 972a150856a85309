// The build of PyTorch with CUDA and the extension of the same release both register options of the allocator, of which
// some have one name, and PyTorch refuses the second that does. Preloaded, this forgets the first's options when the
// second registers its own, so that the two can be tried together. A build without CUDA needs no such thing.
#include <dlfcn.h>
#include <string>
#include <unordered_set>

namespace c10::CachingAllocator {

struct AcceleratorAllocatorConfig {
    using Keys = std::unordered_set<std::string>;
    static Keys &getMutableKeys();
};

AcceleratorAllocatorConfig::Keys &AcceleratorAllocatorConfig::getMutableKeys() {
    static const auto registered = reinterpret_cast<Keys &(*)()>(
        dlsym(RTLD_NEXT, "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev"));
    static const Keys of_every_device = registered();
    return registered() = of_every_device;
}

} // namespace c10::CachingAllocator
