// Packs rows of codes or numbers into the blocks of matmul_format.h. Called once a matrix, while a model loads.
#include <algorithm>
#include <cstring>

#include "step.h"

namespace offbook {
namespace {

// One block's codes; rows: 32 rows of `stride` bytes, already at the block's first input.
void pack_codes4(const uint8_t* const (&rows)[32], uint8_t* to) {
  for (int n = 0; n < 32; n++)
    for (int k = 0; k < 32; k += 8) {
      uint32_t word = 0;
      for (int i = 0; i < 8; i++) word |= static_cast<uint32_t>(rows[n][k + i] & 15) << (4 * (i / 2 + 4 * (i & 1)));
      std::memcpy(to + k * 16 + n * 4, &word, 4);
    }
}

void pack_codes8(const uint8_t* const (&rows)[32], uint8_t* to) {
  for (int n = 0; n < 32; n++)
    for (int k = 0; k < 32; k += 4) {
      const uint8_t* from = rows[n] + k;
      const uint8_t word[4] = {from[0], from[2], from[1], from[3]};
      std::memcpy(to + k * 32 + n * 4, word, 4);
    }
}

template <int kBytes, int kInputs>  // words of kInputs inputs of kBytes bytes each
void pack_words(const uint8_t* const (&rows)[32], uint8_t* to) {
  for (int n = 0; n < 32; n++)
    for (int k = 0; k < 32; k += kInputs)
      std::memcpy(to + (k / kInputs * 32 + n) * kBytes * kInputs, rows[n] + k * kBytes, kBytes * kInputs);
}

void pack_block(int32_t kind, const uint8_t* const (&rows)[32], uint8_t* to) {
  switch (kind) {
    case kCodes4:
      return pack_codes4(rows, to);
    case kCodes8:
      return pack_codes8(rows, to);
    case kBf16:
      return pack_words<2, 2>(rows, to);
    case kF16:
      return pack_words<2, 1>(rows, to);
    default:
      return pack_words<4, 1>(rows, to);
  }
}

// row_bytes of [32 outputs][groups of the block] scales, transposed to [group][32 outputs].
void pack_scales(const uint8_t* scales, int64_t row_bytes, int groups, int bytes, uint8_t* to) {
  for (int g = 0; g < groups; g++)
    for (int n = 0; n < 32; n++) std::memcpy(to + (g * 32 + n) * bytes, scales + n * row_bytes + g * bytes, bytes);
}

}  // namespace
}  // namespace offbook

// Panels begin..end-1 of m (m.data is written). values: [32 panels][inputs] codes (one byte each) or numbers, C order;
// scales, mins: [32 panels][inputs / group], or null.
extern "C" __attribute__((visibility("default"))) void offbook_pack(const offbook::Matrix* matrix, int32_t begin,
                                                                    int32_t end, const uint8_t* values,
                                                                    const uint8_t* scales, const uint8_t* mins) {
  using namespace offbook;
  const Matrix& m = *matrix;
  const int value_bytes = m.kind == kF32 ? 4 : m.kind == kBf16 || m.kind == kF16 ? 2 : 1;
  const int groups = m.group ? 32 / m.group : 0;
  const int64_t row_bytes = int64_t{32} * m.blocks * value_bytes,
                scale_row = int64_t{m.blocks} * groups * m.scale_bytes;
  for (int64_t panel = begin; panel < end; panel++) {
    uint8_t* to = const_cast<uint8_t*>(m.data) + panel * m.blocks * m.block_bytes;
    for (int64_t b = 0; b < m.blocks; b++, to += m.block_bytes) {
      const uint8_t* rows[32];
      for (int n = 0; n < 32; n++) rows[n] = values + (panel * 32 + n) * row_bytes + b * 32 * value_bytes;
      pack_block(m.kind, rows, to);
      if (!groups) continue;
      uint8_t* after = to + (m.kind == kCodes4 ? 512 : 1024);
      const int64_t from = panel * 32 * scale_row + b * groups * m.scale_bytes;
      pack_scales(scales + from, scale_row, groups, m.scale_bytes, after);
      if (m.minimum == kStored)
        pack_scales(mins + from, scale_row, groups, m.scale_bytes, after + groups * 32 * m.scale_bytes);
    }
  }
}
