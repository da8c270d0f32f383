//! Numbers and byte strings: one writer, and a reader that refuses what the writer would not write.

use crate::error::{Error, Result};

/// Append unsigned LEB128 in its shortest form.
pub fn put_uvarint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Append a signed number, zigzag.
pub fn put_svarint(out: &mut Vec<u8>, value: i64) {
    put_uvarint(out, (value << 1 ^ value >> 63) as u64);
}

/// Append a byte string: its length, then its bytes.
pub fn put_block(out: &mut Vec<u8>, bytes: &[u8]) {
    put_uvarint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Reads one object's bytes from front to back; every fault is [`Error::Damaged`], and no length is trusted.
pub struct Cursor<'a> {
    rest: &'a [u8],
    what: &'static str,
}

impl<'a> Cursor<'a> {
    /// `what` is how a fault names the object.
    pub fn new(bytes: &'a [u8], what: &'static str) -> Cursor<'a> {
        Cursor { rest: bytes, what }
    }

    pub fn damaged(&self, why: &str) -> Error {
        Error::Damaged(format!("a damaged {}: {why}", self.what))
    }

    pub fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let Some((taken, rest)) = self.rest.split_at_checked(length) else {
            return Err(self.damaged("it ends too early"));
        };
        self.rest = rest;
        Ok(taken)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let Some((taken, rest)) = self.rest.split_first_chunk() else {
            return Err(self.damaged("it ends too early"));
        };
        self.rest = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    /// An unsigned number of at most `most`.
    pub fn uvarint(&mut self, most: u64) -> Result<u64> {
        let mut value = 0u64;
        let mut shift = 0;
        loop {
            let byte = self.u8()?;
            // The tenth byte has room for one bit.
            if shift == 63 && byte > 1 {
                return Err(self.damaged("a number is too long"));
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                if byte == 0 && shift > 0 {
                    return Err(self.damaged("a number is not in its shortest form"));
                }
                break;
            }
            shift += 7;
        }
        if value > most {
            return Err(self.damaged(&format!("a number is above {most}")));
        }
        Ok(value)
    }

    pub fn svarint(&mut self) -> Result<i64> {
        let value = self.uvarint(u64::MAX)?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// A byte string of `least` to `most` bytes.
    pub fn block(&mut self, least: usize, most: usize) -> Result<&'a [u8]> {
        let length = self.uvarint(most as u64)? as usize;
        if length < least {
            return Err(self.damaged("a name or value is too short"));
        }
        self.take(length)
    }

    /// Refuse bytes that are left over.
    pub fn finish(&self) -> Result<()> {
        if self.is_empty() { Ok(()) } else { Err(self.damaged("there are bytes left over")) }
    }
}
