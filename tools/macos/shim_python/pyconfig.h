// Of CPython on arm64 macOS: what its public headers ask. Sizes come from its own pymacconfig.h.
#pragma once
#define HAVE_CLOCK_GETTIME 1
#define HAVE_FORK 1
#define HAVE_PTHREAD_H 1
#define HAVE_SSIZE_T 1
#define HAVE_STDDEF_H 1
#define HAVE_SYS_SELECT_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_THREAD_LOCAL 1
#define HAVE_WCHAR_H 1
#define SIZEOF_INT 4
#define SIZEOF_LONG_LONG 8
#define SIZEOF_PID_T 4
#define SIZEOF_SHORT 2
#define SIZEOF_WCHAR_T 4
#define WITH_DOC_STRINGS 1
#define WITH_MIMALLOC 1
#define WITH_PYMALLOC 1
#define WITH_THREAD 1
