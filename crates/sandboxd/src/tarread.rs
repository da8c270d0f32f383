//! A tar archive as a stream of entries, from bytes that nobody vouches for.
//!
//! The reader knows v7, ustar with its prefix, pax headers for one entry and for all, GNU's long names and its
//! sparse format 1.0, and sizes in octal and base 256. Whatever it does not know it refuses; it guesses nothing.
//! Bounds: an extended header holds at most 1 MiB, a sparse map at most 262,144 pieces. An archive that ends
//! without its closing zeros was cut off and is refused too, since half a workspace is no workspace.

use crate::errors::{Code, Failure};
use crate::tarfmt::{BLOCK, MAX_EXTENDED, MAX_EXTENTS, Time, checksum, number, padding, record, xattr_name};

/// The next bytes of the archive.
pub enum Next {
    Data(Vec<u8>),
    Eof,
    /// The sender has gone; there is nobody left to answer.
    Aborted,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EntryKind {
    File,
    HardLink,
    Symlink,
    Directory,
    Fifo,
    Device,
}

#[derive(Debug, PartialEq, Eq)]
pub struct Entry {
    pub kind: EntryKind,
    pub path: Vec<u8>,
    pub link: Vec<u8>,
    pub mode: u32,
    pub mtime: Time,
    /// The data that follows, without a sparse map.
    pub data: u64,
    /// The pieces of a file with holes, and its real size.
    pub sparse: Option<(Vec<(u64, u64)>, u64)>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

type Source = Box<dyn FnMut() -> Next + Send>;

pub struct Reader {
    source: Source,
    current: Vec<u8>,
    at: usize,
    started: bool,
    /// Data of the entry at hand that was not taken, and what fills up its last block.
    data: u64,
    pad: u64,
    global_mtime: Option<Time>,
}

/// What extended headers said about the entry that follows them.
#[derive(Default)]
struct Extended {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    mtime: Option<Time>,
    long_path: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    sparse: Sparse,
    xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    any: bool,
}

#[derive(Default)]
struct Sparse {
    major: Option<u64>,
    minor: Option<u64>,
    name: Option<Vec<u8>>,
    real_size: Option<u64>,
    older: bool,
}

fn refuse<T>(message: impl Into<String>) -> Result<T, Failure> {
    Err(Failure::invalid(message))
}

fn decimal(text: &[u8]) -> Result<u64, Failure> {
    let digits = !text.is_empty() && text.iter().all(u8::is_ascii_digit);
    let value = std::str::from_utf8(text).ok().filter(|_| digits).and_then(|text| text.parse().ok());
    match value {
        Some(value) if value <= i64::MAX as u64 => Ok(value),
        _ => refuse("a number in the archive is malformed"),
    }
}

fn until_nul(field: &[u8]) -> &[u8] {
    field.split(|&byte| byte == 0).next().unwrap_or(&[])
}

impl Reader {
    pub fn new(source: impl FnMut() -> Next + Send + 'static) -> Reader {
        Reader {
            source: Box::new(source),
            current: Vec::new(),
            at: 0,
            started: false,
            data: 0,
            pad: 0,
            global_mtime: None,
        }
    }

    /// Bytes that are here, after asking for more where there are none; empty at the end.
    fn available(&mut self) -> Result<&[u8], Failure> {
        while self.at >= self.current.len() {
            match (self.source)() {
                Next::Data(bytes) => (self.current, self.at) = (bytes, 0),
                Next::Eof => return Ok(&[]),
                Next::Aborted => return Err(Failure::new(Code::Internal, "the archive's sender has gone")),
            }
        }
        Ok(&self.current[self.at..])
    }

    fn fill(&mut self, buffer: &mut [u8]) -> Result<(), Failure> {
        let mut filled = 0;
        while filled < buffer.len() {
            let bytes = self.available()?;
            if bytes.is_empty() {
                return refuse("the archive ends too early");
            }
            let count = bytes.len().min(buffer.len() - filled);
            buffer[filled..filled + count].copy_from_slice(&bytes[..count]);
            filled += count;
            self.at += count;
        }
        Ok(())
    }

    fn skip(&mut self, mut count: u64) -> Result<(), Failure> {
        while count > 0 {
            let bytes = self.available()?.len() as u64;
            if bytes == 0 {
                return refuse("the archive ends too early");
            }
            let now = bytes.min(count);
            self.at += now as usize;
            count -= now;
        }
        Ok(())
    }

    /// The next piece of the entry's data, at most `most` bytes; empty when there is no more.
    pub fn piece(&mut self, most: u64) -> Result<&[u8], Failure> {
        let most = most.min(self.data);
        if most == 0 {
            return Ok(&[]);
        }
        let count = (self.available()?.len() as u64).min(most) as usize;
        if count == 0 {
            return refuse("the archive ends too early");
        }
        self.data -= count as u64;
        self.at += count;
        Ok(&self.current[self.at - count..self.at])
    }

    /// Take a small body as a whole.
    fn body(&mut self, size: u64) -> Result<Vec<u8>, Failure> {
        if size > MAX_EXTENDED {
            return refuse(format!("an extended header of {size} bytes"));
        }
        let mut body = vec![0; size as usize];
        self.fill(&mut body)?;
        self.skip(padding(size))?;
        Ok(body)
    }

    /// The next entry, or `None` at the end, when everything that followed it has been passed over.
    pub fn next(&mut self) -> Result<Option<Entry>, Failure> {
        self.skip(self.data)?;
        self.skip(self.pad)?;
        (self.data, self.pad) = (0, 0);
        let mut extended = Extended::default();
        loop {
            let mut block = [0; BLOCK];
            self.fill(&mut block)?;
            if block.iter().all(|&byte| byte == 0) {
                if extended.any || !self.started {
                    return refuse(if self.started {
                        "an extended header without an entry"
                    } else {
                        "not a tar archive"
                    });
                }
                while !self.available()?.is_empty() {
                    self.at = self.current.len();
                }
                return Ok(None);
            }
            let (unsigned, signed) = checksum(&block);
            match number(&block[148..156]) {
                Some(sum) if sum == unsigned as i64 || sum == signed => {}
                _ if self.started => return refuse("a header with a wrong checksum"),
                _ => return refuse("not a tar archive"),
            }
            self.started = true;
            let Some(size) = number(&block[124..136]).and_then(|size| u64::try_from(size).ok()) else {
                return refuse("an entry without a size");
            };
            match block[156] {
                b'x' => {
                    let body = self.body(size)?;
                    extended.records(&body)?;
                }
                b'g' => {
                    let body = self.body(size)?;
                    self.globals(&body)?;
                }
                b'L' => extended.long_path = Some(until_nul(&self.body(size)?).to_vec()),
                b'K' => extended.long_link = Some(until_nul(&self.body(size)?).to_vec()),
                // A volume's label.
                b'V' if size == 0 && !extended.any => continue,
                _ => return self.entry(&block, size, extended).map(Some),
            }
            extended.any = true;
            if block[156] == b'g' {
                // It belongs to no entry.
                extended.any = extended.has_something();
            }
        }
    }

    /// Records for all entries. Only a time makes sense for more than one.
    fn globals(&mut self, mut body: &[u8]) -> Result<(), Failure> {
        while !body.is_empty() {
            let Some((key, value, rest)) = record(body) else {
                return refuse("a malformed record in a pax header");
            };
            body = rest;
            match key {
                b"mtime" => self.global_mtime = Time::parse(value),
                b"path" | b"linkpath" | b"size" => return refuse("one path, link or size for all entries"),
                key if key.starts_with(b"GNU.sparse.") => return refuse("one sparse map for all entries"),
                _ => {}
            }
        }
        Ok(())
    }

    fn entry(&mut self, block: &[u8; BLOCK], size: u64, extended: Extended) -> Result<Entry, Failure> {
        let name = until_nul(&block[..100]);
        let posix = block[257..263] == *b"ustar\0";
        let plain = if posix {
            // Another archiver of old keeps times behind a shorter prefix and says so at the end.
            let end = if block[508..512] == *b"tar\0" { 345 + 131 } else { 500 };
            match until_nul(&block[345..end]) {
                b"" => name.to_vec(),
                prefix => [prefix, b"/", name].concat(),
            }
        } else {
            name.to_vec()
        };
        let path = extended.path.or(extended.long_path).unwrap_or(plain);
        let link =
            extended.link.or(extended.long_link).unwrap_or_else(|| until_nul(&block[157..257]).to_vec());
        let kind = match block[156] {
            // Before there was a type for it, a directory was a name with a slash.
            0 | b'0' | b'7' if path.ends_with(b"/") => EntryKind::Directory,
            0 | b'0' | b'7' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' | b'4' => EntryKind::Device,
            b'5' => EntryKind::Directory,
            b'6' => EntryKind::Fifo,
            b'S' => return refuse("a file with holes in GNU's old format"),
            other => return refuse(format!("an entry of type {:?}", char::from(other))),
        };
        let Some(mode) = number(&block[100..108]).filter(|&mode| mode >= 0) else {
            return refuse("an entry without a mode");
        };
        let Some(seconds) = number(&block[136..148]) else {
            return refuse("an entry without a time");
        };
        let mtime = extended.mtime.or(self.global_mtime).unwrap_or(Time { seconds, nanoseconds: 0 });
        let size = extended.size.unwrap_or(size);
        let mut entry = Entry {
            kind,
            path,
            link,
            mode: (mode & 0o7777) as u32,
            mtime,
            data: 0,
            sparse: None,
            xattrs: extended.xattrs,
        };
        // Links and the like have no data, whatever their size says.
        if kind == EntryKind::File {
            (self.data, self.pad) = (size, padding(size));
            if let Some((name, real_size)) = extended.sparse.named()? {
                entry.path = name;
                entry.sparse = Some((self.sparse_map(real_size)?, real_size));
            }
            entry.data = self.data;
        }
        Ok(entry)
    }

    /// The map in front of the data of GNU's format 1.0: decimal numbers on lines of their own, filled up to whole
    /// blocks.
    fn sparse_map(&mut self, real_size: u64) -> Result<Vec<(u64, u64)>, Failure> {
        let mut block = [0; BLOCK];
        let mut at = BLOCK;
        let mut line = |reader: &mut Reader| -> Result<u64, Failure> {
            let mut text = Vec::new();
            loop {
                if at == BLOCK {
                    if reader.data < BLOCK as u64 {
                        return refuse("a sparse map that does not end");
                    }
                    reader.fill(&mut block)?;
                    reader.data -= BLOCK as u64;
                    at = 0;
                }
                let byte = block[at];
                at += 1;
                match byte {
                    b'\n' => return decimal(&text),
                    _ if text.len() < 20 => text.push(byte),
                    _ => return refuse("a malformed sparse map"),
                }
            }
        };
        let count = line(self)?;
        if count > MAX_EXTENTS as u64 + 1 {
            return refuse(format!("a file in {count} pieces"));
        }
        let (mut pieces, mut end, mut sum) = (Vec::new(), 0u64, 0u64);
        for _ in 0..count {
            let (offset, length) = (line(self)?, line(self)?);
            if offset < end || offset.checked_add(length).is_none_or(|piece_end| piece_end > real_size) {
                return refuse("a sparse map whose pieces overlap or leave the file");
            }
            end = offset + length;
            sum += length;
            pieces.push((offset, length));
        }
        if sum != self.data {
            return refuse("a sparse map that does not fit its data");
        }
        Ok(pieces)
    }
}

impl Extended {
    fn has_something(&self) -> bool {
        self.path.is_some()
            || self.link.is_some()
            || self.size.is_some()
            || self.mtime.is_some()
            || self.long_path.is_some()
            || self.long_link.is_some()
            || !self.xattrs.is_empty()
    }

    fn records(&mut self, mut body: &[u8]) -> Result<(), Failure> {
        // A second header for the same entry replaces the first.
        let (long_path, long_link) = (self.long_path.take(), self.long_link.take());
        *self = Extended { long_path, long_link, ..Extended::default() };
        while !body.is_empty() {
            let Some((key, value, rest)) = record(body) else {
                return refuse("a malformed record in a pax header");
            };
            body = rest;
            match key {
                b"path" => self.path = Some(value.to_vec()).filter(|path| !path.is_empty()),
                b"linkpath" => self.link = Some(value.to_vec()).filter(|link| !link.is_empty()),
                b"size" => self.size = Some(decimal(value)?),
                b"mtime" => match Time::parse(value) {
                    Some(time) => self.mtime = Some(time),
                    None => return refuse("a malformed time in a pax header"),
                },
                b"GNU.sparse.major" => self.sparse.major = Some(decimal(value)?),
                b"GNU.sparse.minor" => self.sparse.minor = Some(decimal(value)?),
                b"GNU.sparse.name" => self.sparse.name = Some(value.to_vec()),
                b"GNU.sparse.realsize" => self.sparse.real_size = Some(decimal(value)?),
                key if key.starts_with(b"GNU.sparse.") => self.sparse.older = true,
                key => {
                    if let Some(name) = xattr_name(key).filter(|name| name.starts_with(b"user.")) {
                        self.xattrs.push((name, value.to_vec()));
                    }
                }
            }
        }
        Ok(())
    }
}

impl Sparse {
    /// Name and real size of a file in format 1.0; `None` for an ordinary file.
    fn named(self) -> Result<Option<(Vec<u8>, u64)>, Failure> {
        match (self.major, self.minor, self.name, self.real_size) {
            (None, None, None, None) if !self.older => Ok(None),
            (Some(1), Some(0), Some(name), Some(size)) => Ok(Some((name, size))),
            _ => refuse("a file with holes in a format other than GNU's 1.0"),
        }
    }
}
