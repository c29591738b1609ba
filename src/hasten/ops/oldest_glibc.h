// Keeps symbols that only recent systems have out of the libraries in a wheel (prebuild.py): included before everything
// else, in those builds alone. A wheel promises glibc 2.28 and the libstdc++ of g++ 8 (manylinux_2_28), as torch's does.
//
// Each definition is hidden, so that no other library sees it.
#pragma once

#include <features.h>

#if defined(__GLIBC__) && !defined(__clang__)
#include <new>
#include <sstream>

#define HASTEN_OWN __attribute__((weak, visibility("hidden")))

// glibc 2.32: whether there is one thread only, so that shared pointers need no atomics. There never is.
extern "C" HASTEN_OWN char __libc_single_threaded = 0;

// libstdc++ of g++ 11.
namespace std {
HASTEN_OWN void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
template std::string std::stringbuf::str() const&;

// The same logarithm under its older name: the newer one does not set errno.
#if defined(__x86_64__)
asm(".symver log,log@GLIBC_2.2.5");
#endif
#endif
