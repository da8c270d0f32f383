//! The nine bytes in front of every payload.

pub const HEADER: usize = 9;
pub const MAX_PAYLOAD: usize = 65_536;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    Hello = 1,
    Open = 2,
    Data = 3,
    Eof = 4,
    Credit = 5,
    End = 6,
    Reset = 7,
    Ping = 8,
    Pong = 9,
    Goaway = 10,
}

impl Kind {
    pub(super) fn from_byte(byte: u8) -> Option<Kind> {
        use Kind::{Credit, Data, End, Eof, Goaway, Hello, Open, Ping, Pong, Reset};
        [Hello, Open, Data, Eof, Credit, End, Reset, Ping, Pong, Goaway]
            .into_iter()
            .find(|kind| *kind as u8 == byte)
    }

    pub(super) fn on_stream_zero(self) -> bool {
        matches!(self, Kind::Hello | Kind::Ping | Kind::Pong | Kind::Goaway)
    }

    pub(super) fn allows_length(self, length: usize) -> bool {
        match self {
            Kind::Data => length >= 2,
            Kind::Eof => length == 1,
            Kind::Credit => length == 4,
            Kind::Ping | Kind::Pong => length == 8,
            _ => length >= 1,
        }
    }
}

/// The nine bytes before a payload of `length` bytes.
pub fn header(kind: Kind, stream: u32, length: usize) -> [u8; HEADER] {
    let mut head = [0; HEADER];
    head[..4].copy_from_slice(&(length as u32).to_be_bytes());
    head[4] = kind as u8;
    head[5..].copy_from_slice(&stream.to_be_bytes());
    head
}
