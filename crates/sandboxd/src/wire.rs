//! The wire, generation 1, without I/O: bytes in, events out. `spec/wire.md` is the text.
//!
//! The driver reads into [`Connection::space`], reports the count to [`Connection::filled`], and takes events
//! with [`Connection::next`] until there are none. Whatever is to be sent gathers in [`Connection::output`].
//! Nothing here knows a socket, a clock or a thread, and one byte at a time gives the same events as all at
//! once.
//!
//! ```text
//! phase       daemon receives            client receives
//! Hello       HELLO {generation, nonce}  HELLO {generation, nonce, proof}
//! Proof       HELLO {proof}              –
//! Open        everything but HELLO       everything but HELLO
//! Closed      nothing: GOAWAY was said   nothing
//! ```
//!
//! A frame is judged as early as its bytes allow: the length with the fourth byte, the kind with the fifth, the
//! stream and fixed lengths with the ninth. Nothing is allocated for a frame that is not allowed.
//!
//! When changing this, change `spec/wire.md`, the vectors and the Python twin with it: a new message is a new
//! generation.

#[cfg(test)]
#[path = "wire/client.rs"]
mod client;
#[path = "wire/frame.rs"]
mod frame;
#[path = "wire/hello.rs"]
mod hello;
#[path = "wire/streams.rs"]
mod streams;
#[cfg(test)]
#[path = "wire/tests.rs"]
mod tests;

use crate::pack::{Map, MapWriter};
use std::collections::HashMap;
use std::ops::Range;
use streams::{Stream, WINDOW};

pub use frame::{HEADER, Kind, MAX_PAYLOAD, header};

pub const GENERATION: u32 = 1;
/// No payload of a peer that has not proved its key is longer.
const MAX_EARLY_PAYLOAD: usize = 1_024;
const READ_BUFFER: usize = 256 << 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    Client,
    Daemon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Hello,
    Proof,
    Open,
    Closed,
}

/// What the other side did. It borrows from the receive buffer.
#[derive(Debug, PartialEq)]
pub enum Event<'a> {
    /// Both sides have proved the key.
    Ready,
    Open {
        stream: u32,
        op: &'a str,
        args: &'a [u8],
    },
    Data {
        stream: u32,
        channel: u8,
        bytes: &'a [u8],
    },
    Eof {
        stream: u32,
        channel: u8,
    },
    /// More may be sent on the stream.
    Credit {
        stream: u32,
    },
    End {
        stream: u32,
        map: &'a [u8],
    },
    Reset {
        stream: u32,
        reason: &'a str,
    },
    Pong([u8; 8]),
    Goaway {
        code: &'a str,
        message: &'a str,
    },
}

/// Why the connection is over. The GOAWAY for it is already in the output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProtocolError {
    pub code: &'static str,
    pub message: String,
}

fn wrong<T>(message: impl Into<String>) -> Result<T, ProtocolError> {
    Err(ProtocolError { code: "protocol", message: message.into() })
}

/// An event that still names its bytes by their place in the buffer, so that the machine can go on changing.
enum Step {
    Nothing,
    Ready,
    Open { stream: u32, op: Range<usize>, args: Range<usize> },
    Arrived { stream: u32 },
    Data { stream: u32, channel: u8, bytes: Range<usize> },
    Eof { stream: u32, channel: u8 },
    Credit { stream: u32 },
    End { stream: u32, map: Range<usize> },
    Reset { stream: u32, reason: Range<usize> },
    Pong([u8; 8]),
    Goaway { code: Range<usize>, message: Range<usize> },
}

pub struct Connection {
    role: Role,
    phase: Phase,
    key: [u8; 32],
    nonce: [u8; 32],
    peer_nonce: [u8; 32],
    generation: u32,
    clock_ns: Option<u64>,
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    out: Vec<u8>,
    streams: HashMap<u32, Stream>,
    last_peer_stream: u32,
    last_own_stream: u32,
    args_arriving: usize,
    arrived: (String, Vec<u8>),
}

impl Connection {
    /// The daemon's side. `nonce` is 32 fresh random bytes.
    pub fn daemon(key: [u8; 32], nonce: [u8; 32]) -> Connection {
        Connection::new(Role::Daemon, key, nonce)
    }

    fn new(role: Role, key: [u8; 32], nonce: [u8; 32]) -> Connection {
        Connection {
            role,
            phase: Phase::Hello,
            key,
            nonce,
            peer_nonce: [0; 32],
            generation: GENERATION,
            clock_ns: None,
            buffer: vec![0; 2 * (HEADER + MAX_EARLY_PAYLOAD)],
            start: 0,
            end: 0,
            out: Vec::new(),
            streams: HashMap::new(),
            last_peer_stream: 0,
            last_own_stream: 0,
            args_arriving: 0,
            arrived: (String::new(), Vec::new()),
        }
    }

    pub fn is_ready(&self) -> bool {
        self.phase == Phase::Open
    }

    /// What the client's clock said when it proved its key, in nanoseconds since the epoch.
    pub fn clock_ns(&self) -> Option<u64> {
        self.clock_ns
    }

    /// Where the next bytes go. Never empty while [`Connection::next`] is asked until it has nothing.
    pub fn space(&mut self) -> &mut [u8] {
        if self.phase == Phase::Open && self.buffer.len() < READ_BUFFER {
            let mut larger = vec![0; READ_BUFFER];
            larger[..self.end - self.start].copy_from_slice(&self.buffer[self.start..self.end]);
            self.buffer = larger;
            self.end -= self.start;
            self.start = 0;
        } else if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.buffer[self.end..]
    }

    /// Say how many bytes were put into [`Connection::space`].
    pub fn filled(&mut self, count: usize) {
        self.end = (self.end + count).min(self.buffer.len());
    }

    /// The frames to send. The driver takes them out after every call that may have added some.
    pub fn output(&mut self) -> &mut Vec<u8> {
        &mut self.out
    }

    /// The next event, or `None` until more bytes have come. After an error the connection is dead.
    pub fn next(&mut self) -> Result<Option<Event<'_>>, ProtocolError> {
        loop {
            let step = match self.take_frame() {
                Ok(None) => return Ok(None),
                Ok(Some((kind, stream, payload))) => self.frame(kind, stream, payload),
                Err(error) => Err(error),
            };
            match step {
                Ok(Step::Nothing) => {}
                Ok(step) => return Ok(Some(self.event(step))),
                Err(error) => {
                    self.goaway(error.code, &error.message);
                    return Err(error);
                }
            }
        }
    }

    fn event(&self, step: Step) -> Event<'_> {
        let text = |range: Range<usize>| std::str::from_utf8(&self.buffer[range]).unwrap_or("");
        match step {
            Step::Nothing | Step::Ready => Event::Ready,
            Step::Open { stream, op, args } => Event::Open { stream, op: text(op), args: &self.buffer[args] },
            Step::Arrived { stream } => Event::Open { stream, op: &self.arrived.0, args: &self.arrived.1 },
            Step::Data { stream, channel, bytes } => {
                Event::Data { stream, channel, bytes: &self.buffer[bytes] }
            }
            Step::Eof { stream, channel } => Event::Eof { stream, channel },
            Step::Credit { stream } => Event::Credit { stream },
            Step::End { stream, map } => Event::End { stream, map: &self.buffer[map] },
            Step::Reset { stream, reason } => Event::Reset { stream, reason: text(reason) },
            Step::Pong(bytes) => Event::Pong(bytes),
            Step::Goaway { code, message } => Event::Goaway { code: text(code), message: text(message) },
        }
    }

    fn take_frame(&mut self) -> Result<Option<(Kind, u32, Range<usize>)>, ProtocolError> {
        let bytes = &self.buffer[self.start..self.end];
        if self.phase == Phase::Closed || bytes.len() < 4 {
            return Ok(None);
        }
        let length = u32::from_be_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]) as usize;
        if length > MAX_PAYLOAD {
            return wrong(format!("a frame of {length} bytes"));
        }
        let early = self.phase != Phase::Open;
        if early && length > MAX_EARLY_PAYLOAD {
            return wrong(format!("a frame of {length} bytes before the hello is over"));
        }
        let Some(&byte) = bytes.get(4) else {
            return Ok(None);
        };
        let Some(kind) = Kind::from_byte(byte) else {
            return wrong(format!("a frame of the unknown kind {byte}"));
        };
        if early && !matches!(kind, Kind::Hello | Kind::Goaway) {
            return wrong(format!("{kind:?} before the hello is over"));
        }
        if !early && kind == Kind::Hello {
            return wrong("a second hello");
        }
        if bytes.len() < HEADER {
            return Ok(None);
        }
        let stream = u32::from_be_bytes([bytes[5], bytes[6], bytes[7], bytes[8]]);
        if (stream == 0) != kind.on_stream_zero() {
            return wrong(format!("{kind:?} on stream {stream}"));
        }
        if !kind.allows_length(length) {
            return wrong(format!("{kind:?} with {length} bytes"));
        }
        if bytes.len() < HEADER + length {
            return Ok(None);
        }
        let payload = self.start + HEADER..self.start + HEADER + length;
        self.start = payload.end;
        Ok(Some((kind, stream, payload)))
    }

    fn frame(&mut self, kind: Kind, stream: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        match kind {
            Kind::Hello => self.on_hello(payload),
            Kind::Open => self.on_open(stream, payload),
            Kind::Data => self.on_data(stream, payload),
            Kind::Eof => self.on_eof(stream, payload.start),
            Kind::Credit => self.on_credit(stream, payload),
            Kind::End => self.on_end(stream, payload),
            Kind::Reset => self.on_reset(stream, payload),
            Kind::Ping => {
                self.out.extend_from_slice(&header(Kind::Pong, 0, payload.len()));
                self.out.extend_from_slice(&self.buffer[payload]);
                Ok(Step::Nothing)
            }
            Kind::Pong => {
                let mut bytes = [0; 8];
                bytes.copy_from_slice(&self.buffer[payload]);
                Ok(Step::Pong(bytes))
            }
            Kind::Goaway => {
                let map = self.map(&payload, kind)?;
                let (Some(code), Some(message)) = (map.str("code"), map.str("message")) else {
                    return wrong("GOAWAY without code and message");
                };
                let (code, message) = (self.place(code.as_bytes()), self.place(message.as_bytes()));
                self.phase = Phase::Closed;
                Ok(Step::Goaway { code, message })
            }
        }
    }

    fn map(&self, payload: &Range<usize>, kind: Kind) -> Result<Map<'_>, ProtocolError> {
        Map::parse(&self.buffer[payload.clone()])
            .or_else(|_| wrong(format!("{kind:?} whose payload is not one map with string keys")))
    }

    /// Where in the buffer a part lies that was borrowed from it.
    fn place(&self, part: &[u8]) -> Range<usize> {
        let start = part.as_ptr() as usize - self.buffer.as_ptr() as usize;
        start..start + part.len()
    }

    fn send(&mut self, kind: Kind, stream: u32, payload: &[u8]) {
        self.out.extend_from_slice(&header(kind, stream, payload.len()));
        self.out.extend_from_slice(payload);
    }

    /// How many bytes of DATA payload may be sent on the stream now; 0 when it is over.
    pub fn credit(&self, stream: u32) -> usize {
        self.streams.get(&stream).map_or(0, |stream| stream.may_send as usize)
    }

    /// Take `cost` from the stream's credit for DATA frames that the caller writes itself.
    pub fn charge(&mut self, stream: u32, cost: usize) {
        if let Some(stream) = self.streams.get_mut(&stream) {
            stream.may_send = stream.may_send.saturating_sub(u32::try_from(cost).unwrap_or(u32::MAX));
        }
    }

    /// Send DATA. The caller has looked at [`Connection::credit`]; `bytes` is not empty and fits one frame.
    pub fn data(&mut self, stream: u32, channel: u8, bytes: &[u8]) {
        self.charge(stream, bytes.len() + 1);
        self.out.extend_from_slice(&header(Kind::Data, stream, bytes.len() + 1));
        self.out.push(channel);
        self.out.extend_from_slice(bytes);
    }

    /// Say that no more DATA comes on a channel, unless the stream is over.
    pub fn eof(&mut self, stream: u32, channel: u8) {
        if self.streams.contains_key(&stream) {
            self.send(Kind::Eof, stream, &[channel]);
        }
    }

    /// The consumer has taken DATA of this cost, so the other side may send as much again.
    pub fn consumed(&mut self, id: u32, cost: u32) {
        let Some(stream) = self.streams.get_mut(&id) else {
            return;
        };
        stream.taken = stream.taken.saturating_add(cost);
        if stream.taken >= WINDOW / 2 {
            let grant = std::mem::take(&mut stream.taken);
            stream.may_receive += grant;
            self.send(Kind::Credit, id, &grant.to_be_bytes());
        }
    }

    /// Send the terminal END with an encoded map, unless the stream is over already.
    pub fn end_stream(&mut self, id: u32, map: &[u8]) {
        if self.streams.contains_key(&id) {
            self.send(Kind::End, id, map);
            self.forget(id);
        }
    }

    pub fn reset(&mut self, id: u32, reason: &str) {
        self.send(Kind::Reset, id, &MapWriter::new(1).str("reason", reason).done());
        self.forget(id);
    }

    /// Say why this side is about to close, once. Nothing is received after it.
    pub fn goaway(&mut self, code: &str, message: &str) {
        if self.phase != Phase::Closed {
            let map = MapWriter::new(2).str("code", code).str("message", message).done();
            self.send(Kind::Goaway, 0, &map);
            self.phase = Phase::Closed;
        }
    }
}

/// `{code, message}`, the message cut to what is reasonable to read.
pub fn error_inner(code: &str, message: &str) -> Vec<u8> {
    let mut end = message.len().min(1_000);
    while !message.is_char_boundary(end) {
        end -= 1;
    }
    MapWriter::new(2).str("code", code).str("message", &message[..end]).done()
}

/// `{error: {code, message}}`.
pub fn error_map(code: &str, message: &str) -> Vec<u8> {
    MapWriter::new(1).raw("error", &error_inner(code, message)).done()
}
