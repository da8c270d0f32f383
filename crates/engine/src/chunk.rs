//! Where the content of a file is cut: FastCDC by the crate `fastcdc`, with the numbers of `spec/store.md`.

use crate::format::MAX_CHUNK;

const MIN: usize = 8_192;
const TARGET: usize = 16_384;
pub const MAX: usize = MAX_CHUNK as usize;
const MASK_SMALL: u64 = 0x0000_d90f_0353_0000;
const MASK_LARGE: u64 = 0x0000_d903_0353_0000;

/// The length of the chunk at the front of `data`, which goes to the end of its run or holds at least [`MAX`] bytes.
pub fn cut(data: &[u8]) -> usize {
    fastcdc::v2020::cut(data, MIN, TARGET, MAX, MASK_SMALL, MASK_LARGE, MASK_SMALL << 1, MASK_LARGE << 1).1
}

#[cfg(test)]
mod tests;
