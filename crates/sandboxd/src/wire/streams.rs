//! The frames of streams: who may send what when.

use super::{Connection, Kind, ProtocolError, Role, Step, error_map, wrong};
use crate::pack::{Map, Value};
use std::ops::Range;

/// What one side may send on a fresh stream before it is given more.
pub const WINDOW: u32 = 262_144;
const MAX_STREAMS: usize = 1_024;
const MAX_ARGS: u64 = 4_194_304;
/// Arguments of all streams that are still arriving. Beyond it a stream is answered `exhausted`.
const MAX_ARGS_TOTAL: usize = 16 << 20;
const MAX_CREDIT: u32 = 0x7fff_ffff;

pub(super) struct Stream {
    /// This side opened it.
    pub(super) own: bool,
    pub(super) may_send: u32,
    pub(super) may_receive: u32,
    /// Taken by the consumer and not yet given back as credit.
    pub(super) taken: u32,
    /// One bit for each channel on which the other side has said EOF.
    pub(super) ended: u8,
    pub(super) args: Args,
}

pub(super) enum Args {
    Inline,
    Arriving { op: String, length: usize, bytes: Vec<u8> },
    Arrived,
}

impl Stream {
    pub(super) fn new(own: bool, args: Args) -> Stream {
        Stream { own, may_send: WINDOW, may_receive: WINDOW, taken: 0, ended: 0, args }
    }

    /// Whether DATA on this channel may come in now.
    fn takes(&self, channel: u8) -> bool {
        let arriving = matches!(self.args, Args::Arriving { .. });
        let expected = match channel {
            0 => !self.own && !arriving,
            1 | 2 | 4 => self.own,
            3 => !self.own && arriving,
            _ => false,
        };
        expected && self.ended & (1 << channel) == 0
    }
}

impl Connection {
    fn is_peers(&self, stream: u32) -> bool {
        (stream % 2 == 1) == (self.role == Role::Daemon)
    }

    pub(super) fn on_open(&mut self, stream: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        if !self.is_peers(stream) || stream <= self.last_peer_stream {
            return wrong(format!("OPEN of stream {stream} after {}", self.last_peer_stream));
        }
        let map = self.map(&payload, Kind::Open)?;
        let Some(op) = map.str("op") else {
            return wrong("OPEN without an op");
        };
        let op_place = self.place(op.as_bytes());
        let (step, args) = match (map.get("args"), map.get("args_len")) {
            (Some(Value::Map(args)), None) if Map::parse(args).is_ok() => {
                (Step::Open { stream, op: op_place, args: self.place(args) }, Args::Inline)
            }
            (None, Some(Value::Uint(length))) if (1..=MAX_ARGS).contains(&length) => {
                let (op, length) = (op.to_string(), length as usize);
                (Step::Nothing, Args::Arriving { op, length, bytes: Vec::new() })
            }
            _ => return wrong("OPEN without args that are a map, or args_len from 1 to 4194304"),
        };
        self.last_peer_stream = stream;
        if self.role == Role::Client {
            self.reset(stream, "no operation is opened by the daemon");
            return Ok(Step::Nothing);
        }
        if self.streams.len() >= MAX_STREAMS {
            return wrong(format!("more than {MAX_STREAMS} streams"));
        }
        if let Args::Arriving { length, .. } = args {
            if self.args_arriving + length > MAX_ARGS_TOTAL {
                let text = "too many long argument lists are arriving at once";
                self.send(Kind::End, stream, &error_map("exhausted", text));
                return Ok(Step::Nothing);
            }
            self.args_arriving += length;
        }
        self.streams.insert(stream, Stream::new(false, args));
        Ok(step)
    }

    /// The state of an open stream; `None` when the frame is for one that is over and is to be discarded.
    fn stream(&mut self, id: u32, kind: Kind) -> Result<Option<&mut Stream>, ProtocolError> {
        let known = if self.is_peers(id) { self.last_peer_stream } else { self.last_own_stream };
        if id > known {
            return wrong(format!("{kind:?} for stream {id}, which was never opened"));
        }
        Ok(self.streams.get_mut(&id))
    }

    pub(super) fn on_data(&mut self, id: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        let channel = self.buffer[payload.start];
        let cost = payload.len() as u32;
        let bytes = payload.start + 1..payload.end;
        let Some(stream) = self.stream(id, Kind::Data)? else {
            return Ok(Step::Nothing);
        };
        if !stream.takes(channel) {
            return wrong(format!("DATA on channel {channel} of stream {id}"));
        }
        if stream.may_receive < cost {
            return wrong(format!("DATA beyond the credit of stream {id}"));
        }
        stream.may_receive -= cost;
        if channel != 3 {
            return Ok(Step::Data { stream: id, channel, bytes });
        }
        let Some(stream) = self.streams.get_mut(&id) else {
            return Ok(Step::Nothing);
        };
        let Args::Arriving { length, bytes: have, .. } = &mut stream.args else {
            return wrong(format!("arguments on stream {id}, which has none to come"));
        };
        if have.len() + bytes.len() > *length {
            return wrong(format!("more arguments on stream {id} than announced"));
        }
        have.extend_from_slice(&self.buffer[bytes]);
        if have.len() < *length {
            self.consumed(id, cost);
            return Ok(Step::Nothing);
        }
        if let Args::Arriving { op, length, bytes } = std::mem::replace(&mut stream.args, Args::Arrived) {
            if Map::parse(&bytes).is_err() {
                return wrong(format!("arguments on stream {id} that are not one map"));
            }
            self.args_arriving -= length;
            self.arrived = (op, bytes);
        }
        self.consumed(id, cost);
        Ok(Step::Arrived { stream: id })
    }

    pub(super) fn on_eof(&mut self, id: u32, at: usize) -> Result<Step, ProtocolError> {
        let channel = self.buffer[at];
        let Some(stream) = self.stream(id, Kind::Eof)? else {
            return Ok(Step::Nothing);
        };
        let after_args = channel == 3 && matches!(stream.args, Args::Arrived) && stream.ended & 8 == 0;
        if !after_args && (channel == 3 || !stream.takes(channel)) {
            return wrong(format!("EOF on channel {channel} of stream {id}"));
        }
        stream.ended |= 1 << channel;
        Ok(if channel == 3 { Step::Nothing } else { Step::Eof { stream: id, channel } })
    }

    pub(super) fn on_credit(&mut self, id: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        let more = self.buffer[payload].iter().fold(0u32, |n, &b| n << 8 | u32::from(b));
        if more == 0 {
            return wrong(format!("CREDIT of 0 on stream {id}"));
        }
        let Some(stream) = self.stream(id, Kind::Credit)? else {
            return Ok(Step::Nothing);
        };
        match stream.may_send.checked_add(more) {
            Some(sum) if sum <= MAX_CREDIT => stream.may_send = sum,
            _ => return wrong(format!("CREDIT above {MAX_CREDIT} on stream {id}")),
        }
        Ok(Step::Credit { stream: id })
    }

    pub(super) fn on_end(&mut self, id: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        self.map(&payload, Kind::End)?;
        match self.stream(id, Kind::End)? {
            None => Ok(Step::Nothing),
            Some(stream) if !stream.own => wrong(format!("END of stream {id} from the side that opened it")),
            Some(_) => {
                self.forget(id);
                Ok(Step::End { stream: id, map: payload })
            }
        }
    }

    pub(super) fn on_reset(&mut self, id: u32, payload: Range<usize>) -> Result<Step, ProtocolError> {
        let Some(reason) = self.map(&payload, Kind::Reset)?.str("reason") else {
            return wrong("RESET without a reason");
        };
        let reason = self.place(reason.as_bytes());
        if self.stream(id, Kind::Reset)?.is_none() {
            return Ok(Step::Nothing);
        }
        self.forget(id);
        Ok(Step::Reset { stream: id, reason })
    }

    pub(super) fn forget(&mut self, id: u32) {
        if let Some(Stream { args: Args::Arriving { length, .. }, .. }) = self.streams.remove(&id) {
            self.args_arriving -= length;
        }
    }
}
