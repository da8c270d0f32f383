//! The operations: their arguments, checked once, and which module does each.

use crate::conn::Stream;
use crate::daemon::Daemon;
use crate::errors::{Code, Failure};
use crate::pack::{Map, Value};
use crate::{archive, change, dial, exec, fsops, sys, watch};
use std::rc::Rc;

/// The longest path that is taken, the kernel's limit without the closing NUL.
const MAX_PATH: usize = 4_095;

pub enum Op {
    Exec(Box<exec::Request>),
    Attach { id: String, cursor: u64, follow: bool },
    Execs,
    Status { id: String },
    Stdin { id: String },
    Close { id: String },
    Signal { id: String, signal: u8 },
    Resize { id: String, size: exec::Size },
    Forget { id: String },
    Stat { path: Vec<u8>, follow: bool },
    List { path: Vec<u8> },
    Read(fsops::ReadRequest),
    Write { path: Vec<u8>, mode: u32 },
    Mkdir { path: Vec<u8>, mode: u32, parents: bool },
    Move { from: Vec<u8>, to: Vec<u8>, replace: bool },
    Remove { path: Vec<u8>, recursive: bool },
    Chmod { path: Vec<u8>, mode: u32 },
    Watch { path: Vec<u8>, recursive: bool },
    Export { max_bytes: u64, path: Option<Vec<u8>> },
    Import { max_bytes: u64, path: Option<Vec<u8>> },
    Changes { max_bytes: u64 },
    Dial(dial::Place),
    Info,
    Stats,
    Sync,
    Freeze,
    Thaw { clock_ns: Option<u64> },
    PrepareCheckpoint,
    Shutdown,
}

/// Read an OPEN. The daemon is needed for what a command inherits from it.
pub fn parse(op: &str, args: &[u8], daemon: &Daemon) -> Result<Op, Failure> {
    let args = Args::new(Map::parse(args).map_err(|_| Failure::invalid("the arguments are not a map"))?);
    Ok(match op {
        "exec.start" => Op::Exec(Box::new(exec::Request::parse(&args, daemon)?)),
        "exec.attach" => Op::Attach {
            id: exec::id(&args)?,
            cursor: args.optional_uint("cursor")?.unwrap_or(0),
            follow: args.bool_or("follow", true)?,
        },
        "exec.list" => Op::Execs,
        "exec.status" => Op::Status { id: exec::id(&args)? },
        "exec.stdin" => Op::Stdin { id: exec::id(&args)? },
        "exec.close" => Op::Close { id: exec::id(&args)? },
        "exec.signal" => match u8::try_from(args.uint("signal")?) {
            Ok(signal @ 1..=64) => Op::Signal { id: exec::id(&args)?, signal },
            _ => return Err(Failure::invalid("signal is not from 1 to 64")),
        },
        "exec.resize" => Op::Resize { id: exec::id(&args)?, size: exec::Size::parse(&args)? },
        "exec.forget" => Op::Forget { id: exec::id(&args)? },
        "fs.stat" => Op::Stat { path: args.path("path")?, follow: args.bool_or("follow", true)? },
        "fs.list" => Op::List { path: args.path("path")? },
        "fs.read" => Op::Read(fsops::ReadRequest {
            path: args.path("path")?,
            offset: args.optional_uint("offset")?.unwrap_or(0),
            length: args.optional_uint("length")?,
            max_bytes: args.optional_uint("max_bytes")?,
        }),
        "fs.write" => Op::Write { path: args.path("path")?, mode: args.mode()? },
        "fs.mkdir" => Op::Mkdir {
            path: args.path("path")?,
            mode: args.mode()?,
            parents: args.bool_or("parents", true)?,
        },
        "fs.move" => Op::Move {
            from: args.path("from")?,
            to: args.path("to")?,
            replace: args.bool_or("replace", true)?,
        },
        "fs.remove" => Op::Remove { path: args.path("path")?, recursive: args.bool_or("recursive", false)? },
        "fs.chmod" => Op::Chmod { path: args.path("path")?, mode: args.mode()? },
        "fs.watch" => Op::Watch { path: args.path("path")?, recursive: args.bool_or("recursive", true)? },
        "tar.export" => Op::Export { max_bytes: args.uint("max_bytes")?, path: args.optional_path("path")? },
        "tar.import" => Op::Import { max_bytes: args.uint("max_bytes")?, path: args.optional_path("path")? },
        "tar.changes" => Op::Changes { max_bytes: args.uint("max_bytes")? },
        "net.dial" => Op::Dial(place(&args)?),
        "sys.sync" => Op::Sync,
        "sys.freeze" => Op::Freeze,
        "sys.thaw" => Op::Thaw { clock_ns: args.optional_uint("clock_ns")? },
        "sys.prepare-checkpoint" => Op::PrepareCheckpoint,
        "sys.shutdown" => Op::Shutdown,
        "sys.info" => Op::Info,
        "sys.stats" => Op::Stats,
        other => {
            let name: String = other.chars().take(64).collect();
            return Err(Failure::new(Code::Unsupported, format!("no operation {name:?}")));
        }
    })
}

fn place(args: &Args<'_>) -> Result<dial::Place, Failure> {
    match (args.optional_uint("port")?, args.optional_path("path")?) {
        (Some(port), None) => match u16::try_from(port) {
            Ok(port @ 1..) => Ok(dial::Place::Port(port)),
            _ => Err(Failure::invalid("port is not from 1 to 65535")),
        },
        (None, Some(path)) => Ok(dial::Place::Path(path)),
        _ => Err(Failure::invalid("either a port or a path is needed")),
    }
}

impl Op {
    /// Whether the client sends data on channel 0.
    pub fn takes_input(&self) -> bool {
        match self {
            Op::Exec(request) => request.takes_input(),
            Op::Write { .. } | Op::Import { .. } | Op::Stdin { .. } | Op::Dial(_) => true,
            _ => false,
        }
    }

    /// Do it and send END.
    pub async fn run(self, daemon: Rc<Daemon>, stream: Rc<Stream>) {
        let result = match self {
            Op::Exec(request) => return exec::run(daemon, stream, *request).await,
            Op::Attach { id, cursor, follow } => {
                exec::ops::attach(&daemon, &stream, &id, cursor, follow).await
            }
            Op::Execs => exec::ops::list(&daemon, &stream).await,
            Op::Status { id } => exec::ops::status(&daemon, &id).map(Some),
            Op::Stdin { id } => exec::ops::stdin(&daemon, &stream, &id).await,
            Op::Close { id } => exec::ops::close(&daemon, &id).map(Some),
            Op::Signal { id, signal } => exec::ops::signal(&daemon, &id, signal).await.map(Some),
            Op::Resize { id, size } => exec::ops::resize(&daemon, &id, size).map(Some),
            Op::Forget { id } => exec::ops::forget(&daemon, &stream, &id).await,
            Op::Stat { path, follow } => fsops::stat(&daemon, path, follow).await.map(Some),
            Op::List { path } => fsops::list(&daemon, &stream, path).await,
            Op::Read(request) => fsops::read(&daemon, &stream, request).await,
            Op::Write { path, mode } => fsops::write(&daemon, &stream, path, mode).await,
            Op::Mkdir { path, mode, parents } => change::mkdir(&daemon, path, mode, parents).await,
            Op::Move { from, to, replace } => change::rename(&daemon, from, to, replace).await,
            Op::Remove { path, recursive } => change::remove(&daemon, &stream, path, recursive).await,
            Op::Chmod { path, mode } => change::chmod(&daemon, path, mode).await,
            Op::Watch { path, recursive } => watch::watch(&daemon, &stream, path, recursive).await,
            Op::Export { max_bytes, path } => archive::export(&daemon, &stream, max_bytes, path).await,
            Op::Import { max_bytes, path } => archive::import(&daemon, &stream, max_bytes, path).await,
            Op::Changes { max_bytes } => archive::changes(&daemon, &stream, max_bytes).await,
            Op::Dial(place) => dial::dial(&daemon, &stream, place).await,
            Op::Sync => sys::sync(&daemon).await,
            Op::Freeze => sys::freeze(&daemon).await,
            Op::Thaw { clock_ns } => sys::thaw(&daemon, clock_ns),
            Op::PrepareCheckpoint => sys::prepare_checkpoint(&daemon, &stream),
            Op::Shutdown => sys::shutdown(&daemon, &stream),
            Op::Info => Ok(Some(sys::info(&daemon))),
            Op::Stats => sys::stats(&daemon).map(Some),
        };
        match result {
            Ok(Some(map)) => stream.end(&map),
            // The stream is over already.
            Ok(None) => {}
            Err(failure) => stream.end(&failure.map()),
        }
    }
}

/// The arguments of an operation with the answers for what is missing or wrong.
pub struct Args<'a>(Map<'a>);

impl<'a> Args<'a> {
    pub fn new(map: Map<'a>) -> Args<'a> {
        Args(map)
    }

    pub fn optional(&self, key: &str) -> Option<Value<'a>> {
        self.0.get(key)
    }

    pub fn get(&self, key: &str) -> Result<Value<'a>, Failure> {
        self.0.get(key).ok_or_else(|| Failure::invalid(format!("{key} is missing")))
    }

    pub fn uint(&self, key: &str) -> Result<u64, Failure> {
        match self.get(key)? {
            Value::Uint(n) => Ok(n),
            _ => Err(Failure::invalid(format!("{key} is not an unsigned integer"))),
        }
    }

    fn optional_uint(&self, key: &str) -> Result<Option<u64>, Failure> {
        if self.0.get(key).is_some() { self.uint(key).map(Some) } else { Ok(None) }
    }

    pub fn bool_or(&self, key: &str, default: bool) -> Result<bool, Failure> {
        match self.0.get(key) {
            None => Ok(default),
            Some(Value::Bool(value)) => Ok(value),
            Some(_) => Err(Failure::invalid(format!("{key} is not true or false"))),
        }
    }

    /// Permission bits under `mode`.
    fn mode(&self) -> Result<u32, Failure> {
        match self.uint("mode")? {
            mode @ 0..=0o7777 => Ok(mode as u32),
            _ => Err(Failure::invalid("mode has more than permission bits")),
        }
    }

    fn optional_path(&self, key: &str) -> Result<Option<Vec<u8>>, Failure> {
        if self.0.get(key).is_some() { self.path(key).map(Some) } else { Ok(None) }
    }

    /// An absolute path without NUL that the kernel could take.
    pub fn path(&self, key: &str) -> Result<Vec<u8>, Failure> {
        let Value::Bin(path) = self.get(key)? else {
            return Err(Failure::invalid(format!("{key} is not bytes")));
        };
        if path.first() != Some(&b'/') {
            return Err(Failure::invalid(format!("{key} is not absolute")));
        }
        if path.contains(&0) {
            return Err(Failure::invalid(format!("{key} has a NUL in it")));
        }
        if path.len() > MAX_PATH {
            return Err(Failure::invalid(format!("{key} is longer than {MAX_PATH} bytes")));
        }
        Ok(path.to_vec())
    }
}
