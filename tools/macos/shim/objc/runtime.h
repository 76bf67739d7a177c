// As much of the macOS header of this name as MLX and metal-cpp need to compile.
#pragma once

typedef struct objc_class* Class;
typedef struct objc_object {
  Class isa;
}* id;
typedef struct objc_object Protocol;
typedef struct objc_selector* SEL;
typedef struct objc_method* Method;
typedef bool BOOL;

extern "C" {
SEL sel_registerName(const char* name);
Class objc_lookUpClass(const char* name);
Protocol* objc_getProtocol(const char* name);
Class object_getClass(id object);
Method class_getInstanceMethod(Class, SEL);
}
