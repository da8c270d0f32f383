//! The client's side of the machine, by which tests drive the daemon.

use super::streams::{Args, Stream};
use super::{Connection, GENERATION, Kind, MAX_PAYLOAD, Role};
use crate::pack::MapWriter;

impl Connection {
    /// The client's side, with its first HELLO in the output.
    pub fn client(key: [u8; 32], nonce: [u8; 32]) -> Connection {
        let mut client = Connection::new(Role::Client, key, nonce);
        let hello = MapWriter::new(2).uint("generation", GENERATION.into()).bin("nonce", &nonce).done();
        client.send(Kind::Hello, 0, &hello);
        client
    }

    /// Open the next stream; long arguments follow on channel 3.
    pub fn open(&mut self, op: &str, args: &[u8]) -> u32 {
        let id = if self.last_own_stream == 0 { 1 } else { self.last_own_stream + 2 };
        self.last_own_stream = id;
        self.streams.insert(id, Stream::new(true, Args::Inline));
        let whole = MapWriter::new(2).str("op", op).raw("args", args).done();
        if whole.len() <= MAX_PAYLOAD {
            self.send(Kind::Open, id, &whole);
        } else {
            let announced = MapWriter::new(2).str("op", op).uint("args_len", args.len() as u64).done();
            self.send(Kind::Open, id, &announced);
        }
        id
    }

    pub fn ping(&mut self, bytes: [u8; 8]) {
        self.send(Kind::Ping, 0, &bytes);
    }

    /// Receive bytes that came from anywhere.
    pub fn feed(&mut self, bytes: &[u8]) {
        let space = self.space();
        assert!(bytes.len() <= space.len(), "more than fits at once");
        space[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }
}
