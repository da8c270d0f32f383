//! The blocks and records of a tar archive, both ways (IEEE Std 1003.1-2017, `pax`; GNU's numbers).

pub const BLOCK: usize = 512;
/// The most that a pax header or a GNU long name may hold.
pub const MAX_EXTENDED: u64 = 1 << 20;
/// Eleven octal digits.
const MAX_OCTAL: u64 = 0o777_7777_7777;
/// The name of an extended header, which no reader shows.
const EXTENDED_NAME: &[u8] = b"././@PaxHeader";
/// The most pieces of data in a file with holes.
pub const MAX_EXTENTS: usize = 262_144;

pub mod kind {
    pub const FILE: u8 = b'0';
    pub const HARD_LINK: u8 = b'1';
    pub const SYMLINK: u8 = b'2';
    pub const DIRECTORY: u8 = b'5';
    pub const FIFO: u8 = b'6';
    pub const EXTENDED: u8 = b'x';
}

/// How many bytes fill up the last block.
pub fn padding(size: u64) -> u64 {
    size.wrapping_neg() % BLOCK as u64
}

/// A moment as the kernel has it: whole seconds, downwards, and nanoseconds after them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Time {
    pub seconds: i64,
    pub nanoseconds: u32,
}

impl Time {
    /// The decimal form of a pax record.
    fn decimal(self) -> String {
        let (sign, seconds, nanoseconds) = if self.seconds < 0 && self.nanoseconds > 0 {
            ("-", (self.seconds + 1).unsigned_abs(), 1_000_000_000 - self.nanoseconds)
        } else {
            (if self.seconds < 0 { "-" } else { "" }, self.seconds.unsigned_abs(), self.nanoseconds)
        };
        let text = format!("{sign}{seconds}.{nanoseconds:09}");
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    }

    /// Read the decimal form; digits beyond nanoseconds are cut off.
    pub fn parse(text: &[u8]) -> Option<Time> {
        let text = std::str::from_utf8(text).ok()?;
        let (negative, text) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
        let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
        if whole.is_empty() || !whole.bytes().chain(fraction.bytes()).all(|byte| byte.is_ascii_digit()) {
            return None;
        }
        let seconds: i64 = whole.parse().ok()?;
        let nanoseconds: u32 = format!("{fraction:0<9}")[..9].parse().ok()?;
        Some(match (negative, nanoseconds) {
            (false, _) => Time { seconds, nanoseconds },
            (true, 0) => Time { seconds: -seconds, nanoseconds: 0 },
            (true, _) => Time { seconds: -seconds - 1, nanoseconds: 1_000_000_000 - nanoseconds },
        })
    }
}

/// One entry to be written.
pub struct Header<'a> {
    pub kind: u8,
    pub name: &'a [u8],
    pub link: &'a [u8],
    pub mode: u32,
    pub size: u64,
    pub mtime: Time,
}

impl Header<'_> {
    /// Append the entry's header blocks to `out`: the pax header where something does not fit the plain one or
    /// `records` has more to say, then the plain one. The data and its padding are the caller's.
    pub fn write(&self, out: &mut Vec<u8>, records: Records) {
        let mut all = Records::default();
        let plain = |name: &[u8]| name.len() <= 100 && name.is_ascii();
        if !plain(self.name) || !plain(self.link) {
            all.push(b"hdrcharset", b"BINARY");
        }
        if !plain(self.name) {
            all.push(b"path", self.name);
        }
        if !plain(self.link) {
            all.push(b"linkpath", self.link);
        }
        if self.size > MAX_OCTAL {
            all.push(b"size", self.size.to_string().as_bytes());
        }
        let in_range = u64::try_from(self.mtime.seconds).is_ok_and(|seconds| seconds <= MAX_OCTAL);
        if self.mtime.nanoseconds != 0 || !in_range {
            all.push(b"mtime", self.mtime.decimal().as_bytes());
        }
        all.0.extend_from_slice(&records.0);
        if !all.0.is_empty() {
            let extended = Header {
                kind: kind::EXTENDED,
                name: EXTENDED_NAME,
                link: b"",
                mode: 0o644,
                size: all.0.len() as u64,
                mtime: Time::default(),
            };
            out.extend_from_slice(&extended.block());
            out.extend_from_slice(&all.0);
            out.resize(out.len() + padding(extended.size) as usize, 0);
        }
        out.extend_from_slice(&self.block());
    }

    fn block(&self) -> [u8; BLOCK] {
        let mut block = [0; BLOCK];
        text(&mut block[..100], self.name);
        octal(&mut block[100..108], u64::from(self.mode));
        octal(&mut block[108..116], 0);
        octal(&mut block[116..124], 0);
        octal(&mut block[124..136], if self.size > MAX_OCTAL { 0 } else { self.size });
        let seconds = u64::try_from(self.mtime.seconds).unwrap_or(0);
        octal(&mut block[136..148], if seconds > MAX_OCTAL { 0 } else { seconds });
        block[156] = self.kind;
        text(&mut block[157..257], self.link);
        block[257..265].copy_from_slice(b"ustar\x0000");
        octal(&mut block[329..337], 0);
        octal(&mut block[337..345], 0);
        let sum = checksum(&block).0;
        octal(&mut block[148..155], sum);
        block[155] = b' ';
        block
    }
}

/// What does not fit is in a record; readers without records see a shortened name.
fn text(field: &mut [u8], value: &[u8]) {
    for (place, &byte) in field.iter_mut().zip(value) {
        *place = if byte.is_ascii() { byte } else { b'_' };
    }
}

/// Octal digits and a NUL.
fn octal(field: &mut [u8], mut value: u64) {
    let digits = field.len() - 1;
    for place in field[..digits].iter_mut().rev() {
        *place = b'0' + (value & 7) as u8;
        value >>= 3;
    }
}

/// The sum of the bytes with the sum's own field as spaces, unsigned and as old archivers have it.
pub fn checksum(block: &[u8; BLOCK]) -> (u64, i64) {
    let bytes =
        || block.iter().enumerate().map(|(at, &byte)| if (148..156).contains(&at) { b' ' } else { byte });
    (bytes().map(u64::from).sum(), bytes().map(|byte| i64::from(byte as i8)).sum())
}

/// A number of a header: octal, or GNU's base 256 where the first bit is set. Empty is 0.
pub fn number(field: &[u8]) -> Option<i64> {
    let (&first, rest) = field.split_first()?;
    if first & 0x80 != 0 {
        let head = if first & 0x40 != 0 { i128::from(first as i8) } else { i128::from(first & 0x3f) };
        let value = rest.iter().fold(head, |sum, &byte| (sum << 8) | i128::from(byte));
        return i64::try_from(value).ok();
    }
    let digits = field.iter().skip_while(|&&byte| byte == b' ');
    let mut value: i64 = 0;
    for &byte in digits {
        match byte {
            b'0'..=b'7' => value = value.checked_mul(8)?.checked_add(i64::from(byte - b'0'))?,
            b' ' | 0 => break,
            _ => return None,
        }
    }
    Some(value)
}

/// Records of a pax header.
#[derive(Default)]
pub struct Records(Vec<u8>);

impl Records {
    pub fn push(&mut self, key: &[u8], value: &[u8]) {
        // The length counts its own digits.
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        while length != rest + length.to_string().len() {
            length = rest + length.to_string().len();
        }
        self.0.extend_from_slice(length.to_string().as_bytes());
        self.0.push(b' ');
        self.0.extend_from_slice(key);
        self.0.push(b'=');
        self.0.extend_from_slice(value);
        self.0.push(b'\n');
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// Take one record off the front: key, value, rest. `None` when it is malformed.
pub fn record(bytes: &[u8]) -> Option<(&[u8], &[u8], &[u8])> {
    let space = bytes.iter().take(12).position(|&byte| byte == b' ')?;
    let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
    let (record, rest) = bytes.split_at_checked(length)?;
    let body = record.get(space + 1..)?.strip_suffix(b"\n")?;
    let equals = body.iter().position(|&byte| byte == b'=')?;
    Some((&body[..equals], &body[equals + 1..], rest))
}

const XATTR: &[u8] = b"SCHILY.xattr.";

/// The keyword of an extended attribute. It may hold no `=`, which is then written as GNU tar does.
pub fn xattr_key(name: &[u8]) -> Vec<u8> {
    let mut key = XATTR.to_vec();
    for &byte in name {
        match byte {
            b'%' => key.extend_from_slice(b"%25"),
            b'=' => key.extend_from_slice(b"%3D"),
            _ => key.push(byte),
        }
    }
    key
}

/// The name of the attribute that a keyword stands for.
pub fn xattr_name(key: &[u8]) -> Option<Vec<u8>> {
    let mut rest = key.strip_prefix(XATTR)?;
    let mut name = Vec::with_capacity(rest.len());
    while let Some((&byte, after)) = rest.split_first() {
        if let Some(after) = rest.strip_prefix(b"%25") {
            name.push(b'%');
            rest = after;
        } else if let Some(after) = rest.strip_prefix(b"%3D") {
            name.push(b'=');
            rest = after;
        } else {
            name.push(byte);
            rest = after;
        }
    }
    Some(name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_in_every_dress() {
        for (field, value) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"00000000", Some(0)),
            (b"\0\0\0\0", Some(0)),
            (b"77777777777\0", Some(0o777_7777_7777)),
            (b"\x80\0\0\0\0\0\0\x02\0\0\0\0", Some(1 << 33)),
            (b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", Some(-1)),
            (b"\x80\0\0\0\xff\xff\xff\xff\xff\xff\xff\xff", None),
            (b"12x\0", None),
            (b"-1\0", None),
        ] {
            assert_eq!(number(field), value, "{field:x?}");
        }
    }

    #[test]
    fn a_record_counts_its_own_digits() {
        for length in [0usize, 1, 85, 86, 87, 88, 89, 90, 985, 990, 995, 9_990] {
            let mut records = Records::default();
            records.push(b"path", &vec![b'x'; length]);
            let (key, value, rest) = record(&records.0).unwrap();
            assert_eq!((key, value.len(), rest.len()), (&b"path"[..], length, 0));
        }
        for bad in [
            &b""[..],
            b"5 a=b\n",
            b"6 a=b",
            b"99 a=b\n",
            b"6 a=bc",
            b"6 abc\n",
            b"x a=b\n",
            b"0 ",
            b"-6 a=b\n",
        ] {
            assert_eq!(record(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn attribute_names_keep_their_signs() {
        let name = b"user.a=b%c%3D";
        assert_eq!(xattr_key(name), b"SCHILY.xattr.user.a%3Db%25c%253D");
        assert_eq!(xattr_name(&xattr_key(name)).unwrap(), name);
    }

    proptest! {
        #[test]
        fn times_survive(seconds in -5_000_000_000i64..50_000_000_000, nanoseconds in 0u32..1_000_000_000) {
            let time = Time { seconds, nanoseconds };
            prop_assert_eq!(Time::parse(time.decimal().as_bytes()), Some(time));
        }

        #[test]
        fn any_record_is_survived(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = record(&bytes);
            let _ = number(&bytes);
            let _ = Time::parse(&bytes);
        }
    }
}
