// One product of a warpgroup, its operands in any layout that a descriptor can say. Runs on both machines.
#include "prim/acc.cuh"
#include "prim/wgmma.cuh"

/// What one operand's descriptor says.
struct Layout {
  int start, leading, stride, first_line;
};

struct Image {
  alignas(1024) unsigned char byte[IMAGE_BYTES];
};

DEVICE void copy_image(Image& s, const Vec16* g_image) {
  for (int i = threadIdx.x; i < IMAGE_BYTES / 16; i += blockDim.x)
    store_shared(reinterpret_cast<Vec16*>(s.byte) + i, load_global(g_image + i));
}

template <bool> struct NumberOf {
  using Type = Element;
};
template <> struct NumberOf<true> {
  using Type = float8_e4m3;
};
using Number = NumberOf<E4M3>::Type;
constexpr Major MAJOR_A = A_MN ? Major::MN : Major::K, MAJOR_B = B_MN ? Major::MN : Major::K;

/// d = a b + c of one product, operands where the image has them; with FROM_REGISTERS a comes as fragments.
KERNEL(128, 1)
product(const Vec16* g_image, const uint32_t* g_a, const float* g_c, float* g_d, Layout a, Layout b,
        int add) {
  Image& s = dynamic_smem<Image>();
  copy_image(s, g_image);
  fence_proxy_async();
  block_sync();
  WarpgroupAccumulator<64, N> acc;
  load_rows(acc, g_c, N, 64, N);
  const uint64_t desc_a = matrix_descriptor<WIDTH_A>(s.byte + a.start, a.leading, a.stride, a.first_line);
  const uint64_t desc_b = matrix_descriptor<WIDTH_B>(s.byte + b.start, b.leading, b.stride, b.first_line);
  uint32_t r_a[4];
  for (int i = 0; i < 4; ++i) r_a[i] = load_global(g_a + threadIdx.x * 4 + i);
  wgmma_fence(acc, r_a);
  if constexpr (FROM_REGISTERS)
    wgmma<Number, MAJOR_B>(acc.tile[0], r_a, desc_b, add);
  else
    wgmma<Number, MAJOR_A, MAJOR_B>(acc.tile[0], desc_a, desc_b, add);
  wgmma_commit();
  wgmma_wait<0>(acc, r_a);
  store_rows(g_d, N, acc, 64, N);
}
