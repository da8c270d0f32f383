//! Records: how an object lies in a pack. Header, form, payload; nothing here does I/O.
//!
//! `spec/store.md` ("Packs") is the source, `store/records.py` the same in Python. [`Encoder`] chooses the form,
//! [`Header::parse`] and [`Decoder`] read every form that any writer chose. The output is bounded by what the kind
//! allows before anything is allocated, and nothing leaves a [`Decoder`] whose id was not checked.
//!
//! A patch's base is a raw-content prefix, never a zstd dictionary, even if its bytes begin like one.

use crate::error::{Error, Result};
use crate::format::{ID_BYTES, Id, Kind, hex, identity};
use std::io;
use zstd_safe::{CCtx, CParameter, DCtx, ResetDirective};

pub const MARK: u8 = 0xa7;
pub const MAX_PATCH_DEPTH: u8 = 4;
/// A payload may be this much longer than its canonical bytes; a longer one was not written by us.
pub const SLACK: usize = 1_024;
/// Header without a base's id.
pub const MIN_HEADER: usize = 48;
pub const MAX_HEADER: usize = MIN_HEADER + ID_BYTES;
pub const PACK_MAGIC: &[u8; 8] = b"ASBPACK1";
pub const PACK_HEADER: usize = 32;
/// Most of the gain at a speed near the disk's.
const LEVEL: i32 = 1;
const PATCH_LEVEL: i32 = 3;
/// RFC 8878, 3.1.1. A skippable frame begins otherwise.
const ZSTD_MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// How a payload holds the canonical bytes; the number is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Form {
    Raw = 0,
    Zstd = 1,
    Patch = 2,
}

/// What a record says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub kind: Kind,
    pub form: Form,
    /// 0, or for a patch more than its base's.
    pub depth: u8,
    /// Bytes of the object.
    pub canonical: usize,
    /// Bytes of the payload.
    pub length: usize,
    pub id: Id,
    /// Of a patch, and of nothing else.
    pub base: Option<Id>,
}

fn damaged(why: &str) -> Error {
    Error::Damaged(format!("a damaged pack: {why}"))
}

impl Header {
    /// Bytes of the header itself.
    pub fn size(&self) -> usize {
        if self.base.is_some() { MAX_HEADER } else { MIN_HEADER }
    }

    /// The header at the front of `bytes` (give 80, or what is left).
    pub fn parse(bytes: &[u8]) -> Result<Header> {
        let Some((head, rest)) = bytes.split_first_chunk::<{ MIN_HEADER - 4 }>() else {
            return Err(damaged("it ends inside a record"));
        };
        let patch = head[2] == Form::Patch as u8;
        let size = if patch { MAX_HEADER } else { MIN_HEADER };
        if head[0] != MARK || bytes.len() < size {
            return Err(damaged("no record where one should be"));
        }
        if word(&bytes[size - 4..]) != crc32fast::hash(&bytes[..size - 4]) {
            return Err(damaged("a record's header does not match its checksum"));
        }
        let form = match head[2] {
            0 => Some(Form::Raw),
            1 => Some(Form::Zstd),
            2 => Some(Form::Patch),
            _ => None,
        };
        let (Some(kind), Some(form)) = (Kind::from_u8(head[1]), form) else {
            return Err(damaged("a record of an unknown kind or form"));
        };
        let (canonical, length) = (word(&head[4..]) as usize, word(&head[8..]) as usize);
        if !(1..=kind.max_canonical()).contains(&canonical) || length > canonical + SLACK {
            return Err(damaged("a record of a length that its kind does not allow"));
        }
        if form == Form::Raw && length != canonical {
            return Err(damaged("a record of a length that its form does not allow"));
        }
        let depth = head[3];
        if if patch { !(1..=MAX_PATCH_DEPTH).contains(&depth) } else { depth != 0 } {
            return Err(damaged("a patch of a wrong depth"));
        }
        let mut id = [0; ID_BYTES];
        id.copy_from_slice(&head[12..]);
        let base = if patch { rest.first_chunk().copied() } else { None };
        Ok(Header { kind, form, depth, canonical, length, id, base })
    }

    fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend([MARK, self.kind as u8, self.form as u8, self.depth]);
        out.extend((self.canonical as u32).to_le_bytes());
        out.extend((self.length as u32).to_le_bytes());
        out.extend(self.id);
        out.extend(self.base.iter().flatten());
        out.extend(crc32fast::hash(&out[start..]).to_le_bytes());
    }
}

fn word(bytes: &[u8]) -> u32 {
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// An object of the same kind that the next one probably resembles.
#[derive(Clone, Copy, Debug)]
pub struct Base<'a> {
    pub id: &'a Id,
    pub canonical: &'a [u8],
    /// Of the base's own patch; 0 when it is none.
    pub depth: u8,
}

/// Makes records; one for each worker.
pub struct Encoder {
    context: CCtx<'static>,
    full: Vec<u8>,
    patch: Vec<u8>,
}

impl Default for Encoder {
    fn default() -> Encoder {
        Encoder::new()
    }
}

impl Encoder {
    pub fn new() -> Encoder {
        Encoder { context: CCtx::create(), full: Vec::new(), patch: Vec::new() }
    }

    /// Append a whole record in its smallest form to `out`; returns the depth of its patch (0: none).
    ///
    /// `id` must be the identity of `canonical`. [`Error::Invalid`] for a length that no object of the kind has.
    pub fn encode(
        &mut self,
        kind: Kind,
        id: &Id,
        canonical: &[u8],
        base: Option<Base<'_>>,
        out: &mut Vec<u8>,
    ) -> Result<u8> {
        if !(1..=kind.max_canonical()).contains(&canonical.len()) {
            return Err(Error::Invalid(format!("an object of {} bytes", canonical.len())));
        }
        self.compress(canonical, LEVEL, None)?;
        let smaller = self.full.len() < canonical.len();
        let mut header = Header {
            kind,
            form: if smaller { Form::Zstd } else { Form::Raw },
            depth: 0,
            canonical: canonical.len(),
            length: if smaller { self.full.len() } else { canonical.len() },
            id: *id,
            base: None,
        };
        let fit =
            |base: &Base<'_>| base.depth < MAX_PATCH_DEPTH && base.id != id && !base.canonical.is_empty();
        if let Some(base) = base.filter(fit) {
            self.compress(canonical, PATCH_LEVEL, Some(base.canonical))?;
            if self.patch.len() + ID_BYTES < header.length {
                header.form = Form::Patch;
                header.depth = base.depth + 1;
                header.length = self.patch.len();
                header.base = Some(*base.id);
            }
        }
        header.put(out);
        out.extend_from_slice(match header.form {
            Form::Raw => canonical,
            Form::Zstd => &self.full,
            Form::Patch => &self.patch,
        });
        Ok(header.depth)
    }

    /// Compress into `patch` where there is a prefix, else into `full`.
    fn compress(&mut self, canonical: &[u8], level: i32, prefix: Option<&[u8]>) -> Result<()> {
        let out = if prefix.is_some() { &mut self.patch } else { &mut self.full };
        out.clear();
        out.reserve(zstd_safe::compress_bound(canonical.len()));
        let context = &mut self.context;
        let mut done = context.set_parameter(CParameter::CompressionLevel(level));
        if let Some(prefix) = prefix {
            // SAFETY: the context refers to the prefix until the reset below, which no path skips.
            let prefix = unsafe { forever(prefix) };
            done = done.and_then(|_| context.ref_prefix(prefix));
        }
        let done = done.and_then(|_| context.compress2(out, canonical));
        if prefix.is_some() || done.is_err() {
            // Forgets the prefix.
            let _ = context.reset(ResetDirective::SessionAndParameters);
        }
        done.map(|_| ()).map_err(|code| {
            Error::io(io::Error::new(io::ErrorKind::OutOfMemory, zstd_safe::get_error_name(code)), b"")
        })
    }
}

/// SAFETY: the caller ends every use of the result before `bytes` ends.
unsafe fn forever(bytes: &[u8]) -> &'static [u8] {
    // SAFETY: as above.
    unsafe { std::slice::from_raw_parts(bytes.as_ptr(), bytes.len()) }
}

/// Takes payloads apart; one for each worker.
pub struct Decoder {
    context: DCtx<'static>,
    out: Vec<u8>,
}

impl Default for Decoder {
    fn default() -> Decoder {
        Decoder::new()
    }
}

impl Decoder {
    pub fn new() -> Decoder {
        Decoder { context: DCtx::create(), out: Vec::new() }
    }

    /// The verified canonical bytes; `base` is the canonical bytes of `header.base` for a patch.
    pub fn decode<'a>(
        &'a mut self,
        header: &Header,
        payload: &'a [u8],
        base: Option<&[u8]>,
    ) -> Result<&'a [u8]> {
        let damaged =
            || Error::Damaged(format!("a damaged pack: object {} is not what was written", hex(&header.id)));
        if payload.len() != header.length {
            return Err(damaged());
        }
        let canonical = match header.form {
            Form::Raw => payload,
            Form::Zstd => self.decompress(header, payload, None).ok_or_else(damaged)?,
            Form::Patch => {
                let base = base.filter(|base| !base.is_empty()).ok_or_else(damaged)?;
                self.decompress(header, payload, Some(base)).ok_or_else(damaged)?
            }
        };
        if canonical.len() != header.canonical || identity(header.kind, canonical) != header.id {
            return Err(damaged());
        }
        Ok(canonical)
    }

    fn decompress(&mut self, header: &Header, payload: &[u8], prefix: Option<&[u8]>) -> Option<&[u8]> {
        let one_frame = payload.starts_with(&ZSTD_MAGIC)
            && zstd_safe::find_frame_compressed_size(payload) == Ok(payload.len());
        let size = zstd_safe::get_frame_content_size(payload).ok().flatten();
        if !one_frame || size != Some(header.canonical as u64) {
            return None;
        }
        self.out.clear();
        self.out.reserve_exact(header.canonical);
        let mut done = Ok(0);
        if let Some(prefix) = prefix {
            // SAFETY: the context refers to the prefix until the reset below, which no path skips.
            let prefix = unsafe { forever(prefix) };
            done = self.context.ref_prefix(prefix);
        }
        let done = done.and_then(|_| self.context.decompress(&mut self.out, payload));
        if prefix.is_some() || done.is_err() {
            // Forgets the prefix.
            let _ = self.context.reset(ResetDirective::SessionAndParameters);
        }
        done.is_ok().then_some(&self.out)
    }
}

#[cfg(test)]
mod tests;
