// What this processor and system can run, best first. With OCTAVO_EMULATE everything that is built in counts: wide
// vectors are then pairs of narrow ones and tiles are memory, which is slow and for tests only.
#pragma once

#include "kernels.h"

#include <string>
#include <vector>

#if defined(OCTAVO_HAVE_AMX) && !defined(OCTAVO_EMULATE)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {

struct InstructionSet {
  const char* name;
  const KernelTable& (*kernels)();
};

#if defined(OCTAVO_HAVE_AVX512) || defined(OCTAVO_HAVE_AMX)
inline bool has_avx512() {
#if defined(OCTAVO_EMULATE)
  return true;
#else
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
#endif
}
#endif

#if defined(OCTAVO_HAVE_AMX)
// The processor has tiles of bfloat16 and of bytes, the system saves them (XCR0 bits 17 and 18), and this process may use them.
inline bool has_amx() {
#if defined(OCTAVO_EMULATE)
  return true;
#else
  unsigned eax, ebx, ecx, edx;
  if (!has_avx512() || !__builtin_cpu_supports("avx512vnni") || !__builtin_cpu_supports("avx512bf16") ||
      !__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  if (!(edx >> 22 & 1) || !(edx >> 24 & 1) || !(edx >> 25 & 1)) return false;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx >> 27 & 1)) return false;  // OSXSAVE
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low >> 17 & 3) != 3) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#endif
}
#endif

inline std::vector<InstructionSet> available_sets() {
  std::vector<InstructionSet> sets;
#if defined(OCTAVO_HAVE_AMX)
  if (has_amx()) sets.push_back({"amx", amx_kernels});
#endif
#if defined(OCTAVO_HAVE_AVX512)
  if (has_avx512()) sets.push_back({"avx512", avx512_kernels});
#endif
#if defined(OCTAVO_HAVE_AVX2)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    sets.push_back({"avx2", avx2_kernels});
#endif
  sets.push_back({"portable", portable_kernels});
  return sets;
}

}  // namespace octavo
