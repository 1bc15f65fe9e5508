// What NVIDIA's own header of this name says to nvcc, said to a C compiler; torch's wheels leave that one out.
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __host__
#define __device__
#define __cudart_builtin__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __location__(annotation)
#define __builtin_align__(bytes) __attribute__((aligned(bytes)))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __inline__ inline
#define __forceinline__ inline
#define __dv(value)
#define __specialization_static static
