//! MessagePack, as much of it as the wire uses.
//!
//! The bytes come from the other side of a wire, so the reader allocates nothing, recurses nowhere and
//! believes no length: every count is met by bytes that are really there before it is used. A [`Map`] is
//! checked once when it is made; a look-up then walks the bytes again, which is cheap for the few keys that
//! a message has and needs no table that a hostile map could make large.

use rmp::Marker;
use rmp::encode::{write_array_len, write_bin, write_bool, write_map_len, write_sint, write_str, write_uint};

/// The bytes are not what the page allows: cut off, not a map, or with keys that are not strings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed;

/// One value, borrowed from the message.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Value<'a> {
    Bool(bool),
    Uint(u64),
    Str(&'a str),
    Bin(&'a [u8]),
    Array(Array<'a>),
    /// A map with its own marker, ready for [`Map::parse`].
    Map(&'a [u8]),
    /// Nil, negative and floating numbers, extensions: no message of the wire has them.
    Other,
}

/// The elements of an array.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Array<'a> {
    len: u32,
    body: &'a [u8],
}

impl<'a> Array<'a> {
    pub fn len(&self) -> usize {
        self.len as usize
    }

    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let mut reader = Reader { rest: self.body };
        (0..self.len).map_while(move |_| reader.value().ok())
    }
}

/// One map with string keys, checked as a whole.
#[derive(Debug, Clone, Copy)]
pub struct Map<'a> {
    len: u32,
    body: &'a [u8],
}

impl<'a> Map<'a> {
    /// Check that `bytes` are exactly one map with string keys.
    pub fn parse(bytes: &'a [u8]) -> Result<Map<'a>, Malformed> {
        let mut reader = Reader { rest: bytes };
        let len = match reader.marker()? {
            Marker::FixMap(n) => u32::from(n),
            Marker::Map16 => reader.number(2)? as u32,
            Marker::Map32 => reader.number(4)? as u32,
            _ => return Err(Malformed),
        };
        let body = reader.rest;
        for _ in 0..len {
            let Value::Str(_) = reader.value()? else {
                return Err(Malformed);
            };
            reader.value()?;
        }
        if reader.rest.is_empty() { Ok(Map { len, body }) } else { Err(Malformed) }
    }

    /// The value under `key`; the last one where a key comes twice.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        let mut reader = Reader { rest: self.body };
        let mut found = None;
        for _ in 0..self.len {
            let name = reader.value().ok()?;
            let value = reader.value().ok()?;
            if name == Value::Str(key) {
                found = Some(value);
            }
        }
        found
    }

    pub fn uint(&self, key: &str) -> Option<u64> {
        match self.get(key) {
            Some(Value::Uint(n)) => Some(n),
            _ => None,
        }
    }

    pub fn str(&self, key: &str) -> Option<&'a str> {
        match self.get(key) {
            Some(Value::Str(s)) => Some(s),
            _ => None,
        }
    }

    pub fn bin(&self, key: &str) -> Option<&'a [u8]> {
        match self.get(key) {
            Some(Value::Bin(b)) => Some(b),
            _ => None,
        }
    }
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: u64) -> Result<&'a [u8], Malformed> {
        let n = usize::try_from(n).map_err(|_| Malformed)?;
        let (head, tail) = self.rest.split_at_checked(n).ok_or(Malformed)?;
        self.rest = tail;
        Ok(head)
    }

    fn marker(&mut self) -> Result<Marker, Malformed> {
        Ok(Marker::from_u8(self.take(1)?[0]))
    }

    fn number(&mut self, width: u64) -> Result<u64, Malformed> {
        Ok(self.take(width)?.iter().fold(0, |n, &b| n << 8 | u64::from(b)))
    }

    /// Pass over `count` values, whatever they hold. The debt can only grow by lengths that are paid for
    /// with at least one byte each, so the loop ends with the bytes.
    fn skip(&mut self, count: u64) -> Result<(), Malformed> {
        let mut owed = count;
        while owed > 0 {
            owed -= 1;
            let more = match self.marker()? {
                Marker::FixArray(n) => u64::from(n),
                Marker::Array16 => self.number(2)?,
                Marker::Array32 => self.number(4)?,
                Marker::FixMap(n) => 2 * u64::from(n),
                Marker::Map16 => 2 * self.number(2)?,
                Marker::Map32 => 2 * self.number(4)?,
                scalar => {
                    self.scalar(scalar)?;
                    0
                }
            };
            owed += more;
            if owed > self.rest.len() as u64 {
                return Err(Malformed);
            }
        }
        Ok(())
    }

    fn value(&mut self) -> Result<Value<'a>, Malformed> {
        let whole = self.rest;
        let marker = self.marker()?;
        let (len, is_map) = match marker {
            Marker::FixArray(n) => (u64::from(n), false),
            Marker::Array16 => (self.number(2)?, false),
            Marker::Array32 => (self.number(4)?, false),
            Marker::FixMap(n) => (u64::from(n), true),
            Marker::Map16 => (self.number(2)?, true),
            Marker::Map32 => (self.number(4)?, true),
            scalar => return self.scalar(scalar),
        };
        let body = self.rest;
        if is_map {
            self.skip(2 * len)?;
            Ok(Value::Map(&whole[..whole.len() - self.rest.len()]))
        } else {
            self.skip(len)?;
            let body = &body[..body.len() - self.rest.len()];
            Ok(Value::Array(Array { len: len as u32, body }))
        }
    }

    fn scalar(&mut self, marker: Marker) -> Result<Value<'a>, Malformed> {
        let text = |bytes: &'a [u8]| std::str::from_utf8(bytes).map(Value::Str).map_err(|_| Malformed);
        Ok(match marker {
            Marker::FixPos(n) => Value::Uint(u64::from(n)),
            Marker::U8 => Value::Uint(self.number(1)?),
            Marker::U16 => Value::Uint(self.number(2)?),
            Marker::U32 => Value::Uint(self.number(4)?),
            Marker::U64 => Value::Uint(self.number(8)?),
            Marker::I8 => signed(self.number(1)? as i8),
            Marker::I16 => signed(self.number(2)? as i16),
            Marker::I32 => signed(self.number(4)? as i32),
            Marker::I64 => signed(self.number(8)? as i64),
            Marker::False => Value::Bool(false),
            Marker::True => Value::Bool(true),
            Marker::FixStr(n) => text(self.take(u64::from(n))?)?,
            Marker::Str8 => {
                let n = self.number(1)?;
                text(self.take(n)?)?
            }
            Marker::Str16 => {
                let n = self.number(2)?;
                text(self.take(n)?)?
            }
            Marker::Str32 => {
                let n = self.number(4)?;
                text(self.take(n)?)?
            }
            Marker::Bin8 => {
                let n = self.number(1)?;
                Value::Bin(self.take(n)?)
            }
            Marker::Bin16 => {
                let n = self.number(2)?;
                Value::Bin(self.take(n)?)
            }
            Marker::Bin32 => {
                let n = self.number(4)?;
                Value::Bin(self.take(n)?)
            }
            Marker::Null | Marker::FixNeg(_) => Value::Other,
            Marker::F32 => self.pass(4)?,
            Marker::F64 => self.pass(8)?,
            Marker::FixExt1 => self.pass(2)?,
            Marker::FixExt2 => self.pass(3)?,
            Marker::FixExt4 => self.pass(5)?,
            Marker::FixExt8 => self.pass(9)?,
            Marker::FixExt16 => self.pass(17)?,
            Marker::Ext8 => {
                let n = self.number(1)?;
                self.pass(n + 1)?
            }
            Marker::Ext16 => {
                let n = self.number(2)?;
                self.pass(n + 1)?
            }
            Marker::Ext32 => {
                let n = self.number(4)?;
                self.pass(n + 1)?
            }
            _ => return Err(Malformed),
        })
    }

    fn pass(&mut self, n: u64) -> Result<Value<'a>, Malformed> {
        self.take(n)?;
        Ok(Value::Other)
    }
}

/// A number that was written signed is as good as an unsigned one when it is not negative.
fn signed<'a>(n: impl Into<i64>) -> Value<'a> {
    u64::try_from(n.into()).map_or(Value::Other, Value::Uint)
}

/// Writes one map, key by key. The number of keys is fixed by [`MapWriter::new`].
pub struct MapWriter(Vec<u8>);

const GROWS: &str = "a Vec takes every write";

impl MapWriter {
    pub fn new(keys: u32) -> MapWriter {
        MapWriter::onto(Vec::new(), keys)
    }

    /// Append a map to what `out` already holds.
    pub fn onto(mut out: Vec<u8>, keys: u32) -> MapWriter {
        write_map_len(&mut out, keys).expect(GROWS);
        MapWriter(out)
    }

    pub fn key(mut self, key: &str) -> MapWriter {
        write_str(&mut self.0, key).expect(GROWS);
        self
    }

    pub fn uint(self, key: &str, n: u64) -> MapWriter {
        let mut out = self.key(key);
        write_uint(&mut out.0, n).expect(GROWS);
        out
    }

    pub fn int(self, key: &str, n: i64) -> MapWriter {
        let mut out = self.key(key);
        write_sint(&mut out.0, n).expect(GROWS);
        out
    }

    pub fn bool(self, key: &str, b: bool) -> MapWriter {
        let mut out = self.key(key);
        write_bool(&mut out.0, b).expect(GROWS);
        out
    }

    pub fn str(self, key: &str, s: &str) -> MapWriter {
        let mut out = self.key(key);
        write_str(&mut out.0, s).expect(GROWS);
        out
    }

    pub fn bin(self, key: &str, b: &[u8]) -> MapWriter {
        let mut out = self.key(key);
        write_bin(&mut out.0, b).expect(GROWS);
        out
    }

    /// Put in a value that is already encoded.
    pub fn raw(self, key: &str, value: &[u8]) -> MapWriter {
        let mut out = self.key(key);
        out.0.extend_from_slice(value);
        out
    }

    /// An array of bytes.
    pub fn bins(self, key: &str, list: &[Vec<u8>]) -> MapWriter {
        let mut out = self.key(key);
        write_array_len(&mut out.0, list.len() as u32).expect(GROWS);
        for bytes in list {
            write_bin(&mut out.0, bytes).expect(GROWS);
        }
        out
    }

    /// An array of pairs of bytes and text.
    pub fn pairs(self, key: &str, pairs: &[(Vec<u8>, String)]) -> MapWriter {
        let mut out = self.key(key);
        write_array_len(&mut out.0, pairs.len() as u32).expect(GROWS);
        for (bytes, text) in pairs {
            write_array_len(&mut out.0, 2).expect(GROWS);
            write_bin(&mut out.0, bytes).expect(GROWS);
            write_str(&mut out.0, text).expect(GROWS);
        }
        out
    }

    pub fn done(self) -> Vec<u8> {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_what_it_wrote() {
        let bytes = MapWriter::new(5)
            .uint("n", 300)
            .int("i", -5)
            .bool("b", true)
            .str("s", "text")
            .bin("x", b"\xff\x00")
            .done();
        let map = Map::parse(&bytes).unwrap();
        assert_eq!(map.uint("n"), Some(300));
        assert_eq!(map.get("i"), Some(Value::Other));
        assert_eq!(map.get("b"), Some(Value::Bool(true)));
        assert_eq!(map.str("s"), Some("text"));
        assert_eq!(map.bin("x"), Some(&b"\xff\x00"[..]));
        assert_eq!(map.get("absent"), None);
        assert!(map.bin("s").is_none(), "text is not bytes");
    }

    #[test]
    fn refuses_what_is_no_single_map() {
        for bytes in [
            &b""[..],
            b"\x90",
            b"\x80\x00",
            b"\x81\x01\x02",
            b"\x81\xa1k",
            b"\xdf\xff\xff\xff\xff",
            b"\x81\xa1k\xdd\xff\xff\xff\xff",
            b"\x81\xa1\xff\x01",
            b"\x81\xa1k\xc1",
        ] {
            assert!(Map::parse(bytes).is_err(), "{bytes:x?}");
        }
    }

    #[test]
    fn deep_nesting_costs_no_stack() {
        let mut bytes = b"\x81\xa1k".to_vec();
        bytes.extend(std::iter::repeat_n(0x91, 1_000_000));
        assert!(Map::parse(&bytes).is_err());
        bytes.push(0xc0);
        assert!(matches!(Map::parse(&bytes).unwrap().get("k"), Some(Value::Array(a)) if a.len() == 1));
    }

    proptest! {
        #[test]
        fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(map) = Map::parse(&bytes) {
                let _ = map.get("k");
            }
        }
    }
}
