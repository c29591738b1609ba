// Functions that only recent systems have, for the libraries in a wheel: prebuild.py compiles this file and links it to
// each of them. A wheel promises glibc 2.28 and the libstdc++ of g++ 8 (manylinux_2_28), as torch's does.
// The linker takes them from here, so that the system need not have them.
#include <new>
#include <sstream>

// glibc 2.29: a logarithm that does not set errno; the older one computes the same.
#if defined(__x86_64__)
asm(".symver older_log, log@GLIBC_2.2.5");
extern "C" double older_log(double x);
extern "C" __attribute__((visibility("hidden"))) double own_log(double x) asm("log");
double own_log(double x) { return older_log(x); }
#endif

// glibc 2.32: whether there is one thread only, so that shared pointers need no atomics. There never is.
extern "C" __attribute__((visibility("hidden"))) char __libc_single_threaded;
char __libc_single_threaded = 0;

// libstdc++ of g++ 9 and 11.
namespace std {
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}
template std::ostringstream::basic_ostringstream();
template std::stringstream::basic_stringstream();
template std::string std::stringbuf::str() const&;
template std::string std::stringbuf::str() &&;
