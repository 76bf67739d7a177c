// Declarations of a macOS system header, as many as MLX and metal-cpp need to compile.
#pragma once
#include <cstddef>
#include <cstdint>
typedef struct objc_class* Class;
struct objc_object { Class isa; };
typedef struct objc_object* id;
typedef struct objc_selector* SEL;
typedef struct objc_object Protocol;
typedef bool BOOL;
typedef void (*IMP)(void);
typedef struct objc_method* Method;
extern "C" {
SEL sel_registerName(const char*);
Class objc_lookUpClass(const char*);
Class objc_getClass(const char*);
Protocol* objc_getProtocol(const char*);
Class object_getClass(id);
Method class_getInstanceMethod(Class, SEL);
bool class_respondsToSelector(Class, SEL);
const char* sel_getName(SEL);
}
