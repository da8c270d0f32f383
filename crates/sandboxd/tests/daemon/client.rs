//! A daemon on this host and a client that is written from the page alone, sharing no code with the daemon.

use hmac::{Hmac, Mac};
use rmp::encode::{write_array_len, write_bin, write_bool, write_map_len, write_str, write_uint};
use sha2::Sha256;
use std::collections::HashMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// Every daemon of these tests has a user of its own from here on, so that none disturbs another's.
const FIRST_UID: u32 = 34_567;
pub const WINDOW: u32 = 262_144;
pub const KEY: [u8; 32] = [42; 32];
/// A control group's `memory.events` before anything was killed.
const KERNELS_COUNT: &str = "low 0\nhigh 0\nmax 3\noom 0\noom_kill 0\noom_group_kill 0\n";

/// A decoded MessagePack value.
#[derive(Debug, Clone, PartialEq)]
pub enum Item {
    Bool(bool),
    Int(i64),
    Str(String),
    Bin(Vec<u8>),
    Array(Vec<Item>),
    Map(HashMap<String, Item>),
}

impl Item {
    pub fn get(&self, key: &str) -> Option<&Item> {
        match self {
            Item::Map(map) => map.get(key),
            _ => None,
        }
    }

    pub fn int(&self, key: &str) -> Option<i64> {
        match self.get(key) {
            Some(Item::Int(n)) => Some(*n),
            _ => None,
        }
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        match self.get(key) {
            Some(Item::Str(text)) => Some(text),
            _ => None,
        }
    }

    /// The code of an error, or "" for a result.
    pub fn error(&self) -> &str {
        self.get("error").and_then(|error| error.text("code")).unwrap_or("")
    }

    /// Decode one value and leave the rest.
    pub fn decode(bytes: &mut &[u8]) -> Item {
        fn number(bytes: &mut &[u8], width: usize) -> u64 {
            let (head, rest) = bytes.split_at(width);
            *bytes = rest;
            head.iter().fold(0, |n, &b| n << 8 | u64::from(b))
        }
        fn take(bytes: &mut &[u8], length: u64) -> Vec<u8> {
            let (head, rest) = bytes.split_at(length as usize);
            *bytes = rest;
            head.to_vec()
        }
        let text = |bytes| Item::Str(String::from_utf8(bytes).unwrap());
        let list = |bytes: &mut &[u8], n: u64| Item::Array((0..n).map(|_| Item::decode(bytes)).collect());
        let map = |bytes: &mut &[u8], n: u64| {
            let pair = |bytes: &mut &[u8]| match Item::decode(bytes) {
                Item::Str(key) => (key, Item::decode(bytes)),
                other => panic!("key {other:?}"),
            };
            Item::Map((0..n).map(|_| pair(bytes)).collect())
        };
        match number(bytes, 1) as u8 {
            n @ 0..=0x7f => Item::Int(n.into()),
            n @ 0x80..=0x8f => map(bytes, u64::from(n & 15)),
            n @ 0x90..=0x9f => list(bytes, u64::from(n & 15)),
            n @ 0xa0..=0xbf => text(take(bytes, u64::from(n & 31))),
            0xc2 => Item::Bool(false),
            0xc3 => Item::Bool(true),
            width @ 0xc4..=0xc6 => {
                let length = number(bytes, 1 << (width - 0xc4));
                Item::Bin(take(bytes, length))
            }
            width @ 0xcc..=0xcf => Item::Int(number(bytes, 1 << (width - 0xcc)) as i64),
            0xd0 => Item::Int((number(bytes, 1) as i8).into()),
            0xd1 => Item::Int((number(bytes, 2) as i16).into()),
            0xd2 => Item::Int((number(bytes, 4) as i32).into()),
            0xd3 => Item::Int(number(bytes, 8) as i64),
            width @ 0xd9..=0xdb => {
                let length = number(bytes, 1 << (width - 0xd9));
                text(take(bytes, length))
            }
            width @ 0xdc..=0xdd => {
                let length = number(bytes, 2 << (width - 0xdc));
                list(bytes, length)
            }
            n @ 0xe0..=0xff => Item::Int((n as i8).into()),
            other => panic!("marker {other:#x}"),
        }
    }
}

/// A map to be sent.
#[derive(Clone)]
pub struct Args {
    count: u32,
    body: Vec<u8>,
}

impl Args {
    pub fn new() -> Args {
        Args { count: 0, body: Vec::new() }
    }

    fn key(mut self, key: &str) -> Args {
        self.count += 1;
        write_str(&mut self.body, key).unwrap();
        self
    }

    pub fn uint(self, key: &str, n: u64) -> Args {
        let mut args = self.key(key);
        write_uint(&mut args.body, n).unwrap();
        args
    }

    pub fn bool(self, key: &str, b: bool) -> Args {
        let mut args = self.key(key);
        write_bool(&mut args.body, b).unwrap();
        args
    }

    pub fn str(self, key: &str, text: &str) -> Args {
        let mut args = self.key(key);
        write_str(&mut args.body, text).unwrap();
        args
    }

    pub fn bin(self, key: &str, bytes: impl AsRef<[u8]>) -> Args {
        let mut args = self.key(key);
        write_bin(&mut args.body, bytes.as_ref()).unwrap();
        args
    }

    pub fn bins(self, key: &str, list: &[&[u8]]) -> Args {
        let mut args = self.key(key);
        write_array_len(&mut args.body, list.len() as u32).unwrap();
        for bytes in list {
            write_bin(&mut args.body, bytes).unwrap();
        }
        args
    }

    pub fn pairs(self, key: &str, list: &[(&[u8], &[u8])]) -> Args {
        let mut args = self.key(key);
        write_array_len(&mut args.body, list.len() as u32).unwrap();
        for (first, second) in list {
            write_array_len(&mut args.body, 2).unwrap();
            write_bin(&mut args.body, first).unwrap();
            write_bin(&mut args.body, second).unwrap();
        }
        args
    }

    pub fn raw(self, key: &str, value: &[u8]) -> Args {
        let mut args = self.key(key);
        args.body.extend_from_slice(value);
        args
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = Vec::new();
        write_map_len(&mut out, self.count).unwrap();
        [out, self.body.clone()].concat()
    }
}

/// A running daemon with a workspace of its own.
pub struct Host {
    pub child: Child,
    pub place: PathBuf,
    pub socket: PathBuf,
    pub uid: u32,
}

impl Host {
    /// A socket and a configuration handed in as descriptors.
    pub fn start() -> Host {
        let (place, socket, uid) = Host::prepare();
        let listener = UnixListener::bind(&socket).unwrap();
        let (reader, mut writer) = std::io::pipe().unwrap();
        writer.write_all(&Host::config(&place, uid, &KEY)).unwrap();
        drop(writer);
        let (listen, config) = (listener.as_raw_fd(), reader.as_raw_fd());
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxd"));
        command.args(["--listen-fd", &listen.to_string(), "--config-fd", &config.to_string()]);
        // SAFETY: only a system call runs between fork and exec.
        unsafe {
            command.pre_exec(move || {
                for fd in [listen, config] {
                    libc::fcntl(fd, libc::F_SETFD, 0);
                }
                Ok(())
            });
        }
        Host::wait(command, place, socket, uid)
    }

    /// A path that the daemon binds and a file with the configuration.
    pub fn start_by_path() -> Host {
        let (place, socket, uid) = Host::prepare();
        drop(UnixListener::bind(&socket).unwrap());
        let config = place.join("config");
        fs::write(&config, Host::config(&place, uid, &KEY)).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_sandboxd"));
        command.arg("--listen").arg(&socket).arg("--config").arg(&config);
        Host::wait(command, place, socket, uid)
    }

    fn prepare() -> (PathBuf, PathBuf, u32) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        assert_eq!(rustix::process::geteuid().as_raw(), 0, "the daemon's tests need root");
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let uid = FIRST_UID + number;
        let place = std::env::temp_dir().join(format!("asb-daemon-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(place.join("w")).unwrap();
        std::os::unix::fs::chown(place.join("w"), Some(uid), Some(uid)).unwrap();
        fs::write(place.join("memory.events"), KERNELS_COUNT).unwrap();
        let socket = place.join("socket");
        (place, socket, uid)
    }

    fn config(place: &std::path::Path, uid: u32, key: &[u8]) -> Vec<u8> {
        let workspace = place.join("w").into_os_string().into_encoded_bytes();
        Args::new()
            .bin("key", key)
            .uint("uid", uid.into())
            .uint("gid", uid.into())
            .bin("workspace", workspace)
            .bin("memory_events", place.join("memory.events").into_os_string().into_encoded_bytes())
            .bytes()
    }

    /// Give a daemon that was started by path another key, for when it reads its configuration again.
    pub fn configure(&self, key: &[u8]) {
        fs::write(self.place.join("config"), Host::config(&self.place, self.uid, key)).unwrap();
    }

    fn wait(mut command: Command, place: PathBuf, socket: PathBuf, uid: u32) -> Host {
        let mut child = command.stdout(Stdio::piped()).stdin(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "sandboxd ready generation=1\n");
        Host { child, place, socket, uid }
    }

    pub fn at(&self, name: &str) -> Vec<u8> {
        self.place.join("w").join(name).into_os_string().into_encoded_bytes()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.place.join("w").join(name)
    }

    pub fn connect(&self) -> Client {
        let mut client = self.knock();
        client.hello(&KEY);
        client
    }

    /// A connection without a hello.
    pub fn knock(&self) -> Client {
        let socket = UnixStream::connect(&self.socket).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        Client { socket, next: 1, pending: Vec::new() }
    }

    /// What the daemon reads in place of the kernel's count of processes killed for want of memory.
    pub fn killed_for_memory(&self, text: &str) {
        fs::write(self.place.join("memory.events"), text).unwrap();
    }

    /// A number from the daemon's status file.
    pub fn status(&self, key: &str) -> u64 {
        let text = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = text.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    /// The daemon's own children: state and process id.
    pub fn children(&self) -> Vec<(char, i32)> {
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else { continue };
            let fields: Vec<&str> = stat[stat.rfind(')').unwrap() + 2..].split(' ').collect();
            if fields[1] == self.child.id().to_string() {
                found.push((fields[0].chars().next().unwrap(), pid));
            }
        }
        found
    }

    /// Those that wait for a command: they live and have no child.
    pub fn idle(&self) -> Vec<i32> {
        let idle = |&(state, pid): &(char, i32)| state == 'S' && below(pid).is_empty();
        self.children().into_iter().filter(idle).map(|(_, pid)| pid).collect()
    }

    /// Whether nothing of any command is left: no child but the few that wait for one.
    pub fn is_at_rest(&self) -> bool {
        let children = self.children().len();
        children <= 2 && children == self.idle().len()
    }
}

/// The processes below one.
fn below(pid: i32) -> Vec<i32> {
    let found = fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
    found.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

impl Drop for Host {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Supervisors end their trees when the daemon is gone.
        let _ = Command::new("rm").arg("-rf").arg(&self.place).status();
    }
}

/// What came on a stream until its END.
#[derive(Debug)]
pub struct Done {
    pub end: Item,
    pub out: Vec<u8>,
    pub err: Vec<u8>,
    pub notes: Vec<Item>,
}

pub type Frame = (u8, u32, Vec<u8>);

pub struct Client {
    pub socket: UnixStream,
    next: u32,
    pending: Vec<Frame>,
}

impl Client {
    pub fn send(&mut self, kind: u8, stream: u32, payload: &[u8]) {
        let mut frame = (payload.len() as u32).to_be_bytes().to_vec();
        frame.push(kind);
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend_from_slice(payload);
        self.socket.write_all(&frame).unwrap();
    }

    /// The next frame, or `None` when the daemon has closed.
    pub fn receive(&mut self) -> Option<Frame> {
        let mut head = [0; 9];
        match self.socket.read_exact(&mut head) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => panic!("nothing comes"),
            Err(_) => return None,
        }
        let length = u32::from_be_bytes(head[..4].try_into().unwrap()) as usize;
        assert!(length <= 65_536);
        let mut payload = vec![0; length];
        self.socket.read_exact(&mut payload).unwrap();
        Some((head[4], u32::from_be_bytes(head[5..].try_into().unwrap()), payload))
    }

    /// The code of the GOAWAY with which the daemon closes.
    pub fn last_word(&mut self) -> String {
        let mut code = String::new();
        while let Some((kind, _, payload)) = self.receive() {
            if kind == 10 {
                code = Item::decode(&mut &payload[..]).text("code").unwrap().to_string();
            }
        }
        code
    }

    pub fn hello(&mut self, key: &[u8]) {
        self.hello_to(&KEY, key);
    }

    /// Prove `key` to a daemon that has to prove `its`.
    pub fn hello_to(&mut self, its: &[u8], key: &[u8]) {
        let nonce = [7; 32];
        self.send(1, 0, &Args::new().uint("generation", 1).bin("nonce", nonce).bytes());
        let (kind, _, payload) = self.receive().unwrap();
        assert_eq!(kind, 1);
        let hello = Item::decode(&mut &payload[..]);
        let (Some(Item::Bin(theirs)), Some(Item::Bin(proof))) = (hello.get("nonce"), hello.get("proof"))
        else {
            panic!("{hello:?}");
        };
        let prove = |key: &[u8], role: &[u8]| {
            let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
            mac.update(&[role, &1u32.to_be_bytes(), &nonce, theirs].concat());
            mac.finalize().into_bytes().to_vec()
        };
        assert_eq!(*proof, prove(its, b"daemon"));
        self.send(1, 0, &Args::new().bin("proof", prove(key, b"client")).bytes());
    }

    pub fn open(&mut self, op: &str, args: &Args) -> u32 {
        let id = self.next;
        self.next += 2;
        let encoded = args.bytes();
        let whole = Args::new().str("op", op).raw("args", &encoded).bytes();
        if whole.len() <= 65_536 {
            self.send(2, id, &whole);
            return id;
        }
        self.send(2, id, &Args::new().str("op", op).uint("args_len", encoded.len() as u64).bytes());
        self.upload(id, 3, &encoded);
        id
    }

    /// Send bytes within the credit; `false` when the stream ended meanwhile.
    pub fn upload(&mut self, id: u32, channel: u8, mut bytes: &[u8]) -> bool {
        let mut credit = WINDOW as usize;
        while !bytes.is_empty() {
            if credit < 2 {
                let (kind, stream, payload) = self.receive().unwrap();
                match (kind, stream == id) {
                    (5, true) => credit += u32::from_be_bytes(payload.try_into().unwrap()) as usize,
                    (6, true) => {
                        self.pending.push((kind, stream, payload));
                        return false;
                    }
                    _ => self.pending.push((kind, stream, payload)),
                }
                continue;
            }
            let (now, later) = bytes.split_at(bytes.len().min(credit - 1).min(65_535));
            self.send(3, id, &[&[channel], now].concat());
            credit -= now.len() + 1;
            bytes = later;
        }
        true
    }

    pub fn eof(&mut self, id: u32) {
        self.send(4, id, &[0]);
    }

    pub fn reset(&mut self, id: u32) {
        self.send(7, id, &Args::new().str("reason", "test").bytes());
    }

    pub fn credit(&mut self, id: u32, bytes: u32) {
        self.send(5, id, &bytes.to_be_bytes());
    }

    /// The next frame of one stream. Those of others wait.
    pub fn next_of(&mut self, id: u32) -> Frame {
        if let Some(at) = self.pending.iter().position(|(_, stream, _)| *stream == id) {
            return self.pending.remove(at);
        }
        loop {
            let frame = self.receive().expect("the daemon has closed");
            if frame.1 == id {
                return frame;
            }
            assert_ne!(frame.0, 10, "GOAWAY {:?}", String::from_utf8_lossy(&frame.2));
            self.pending.push(frame);
        }
    }

    /// Wait for a note on a stream that sends nothing else before it.
    pub fn note(&mut self, id: u32) -> Item {
        loop {
            match self.next_of(id) {
                (3, _, payload) if payload[0] == 4 => return Item::decode(&mut &payload[1..]),
                (5, ..) => {}
                other => panic!("no note but {other:?}"),
            }
        }
    }

    /// Read output until it has these bytes in it, and answer all of it.
    pub fn output_with(&mut self, id: u32, wanted: &str) -> String {
        let mut out = Vec::new();
        loop {
            let text = String::from_utf8_lossy(&out).into_owned();
            if text.contains(wanted) {
                return text;
            }
            match self.next_of(id) {
                (3, _, payload) if payload[0] < 3 => {
                    out.extend_from_slice(&payload[1..]);
                    self.credit(id, payload.len() as u32);
                }
                (3 | 5, ..) => {}
                (_, _, payload) => panic!("{text:?}, then {:?}", Item::decode(&mut &payload[..])),
            }
        }
    }

    /// Take everything of a stream until END, giving credit.
    pub fn finish(&mut self, id: u32) -> Done {
        let (mut out, mut err, mut notes, mut taken) = (Vec::new(), Vec::new(), Vec::new(), 0);
        loop {
            let (kind, _, payload) = self.next_of(id);
            match kind {
                3 => {
                    match payload[0] {
                        1 => out.extend_from_slice(&payload[1..]),
                        2 => err.extend_from_slice(&payload[1..]),
                        4 => notes.push(Item::decode(&mut &payload[1..])),
                        other => panic!("channel {other}"),
                    }
                    taken += payload.len() as u32;
                    if taken >= WINDOW / 2 {
                        self.credit(id, taken);
                        taken = 0;
                    }
                }
                4 | 5 => {}
                6 => return Done { end: Item::decode(&mut &payload[..]), out, err, notes },
                other => panic!("kind {other} on stream {id}"),
            }
        }
    }

    pub fn call(&mut self, op: &str, args: &Args) -> Done {
        let id = self.open(op, args);
        self.finish(id)
    }

    pub fn put(&mut self, op: &str, args: &Args, bytes: &[u8]) -> Item {
        let id = self.open(op, args);
        if self.upload(id, 0, bytes) {
            self.eof(id);
        }
        self.finish(id).end
    }

    /// Start a shell script.
    pub fn start(&mut self, script: &str, timeout_ms: u64) -> u32 {
        self.open("exec.start", &command(&[b"sh", b"-c", script.as_bytes()], timeout_ms))
    }

    pub fn shell(&mut self, script: &str) -> Done {
        let id = self.start(script, 100_000);
        self.finish(id)
    }
}

pub fn command(argv: &[&[u8]], timeout_ms: u64) -> Args {
    Args::new()
        .bins("argv", argv)
        .pairs("env", &[(b"PATH", b"/usr/local/bin:/usr/bin:/bin"), (b"WHO", b"me")])
        .bin("cwd", "/")
        .uint("timeout_ms", timeout_ms)
}

/// A shell script as an object.
pub fn named(id: &str, script: &str) -> Args {
    command(&[b"sh", b"-c", script.as_bytes()], 20_000).str("id", id)
}

pub fn by_id(id: &str) -> Args {
    Args::new().str("id", id)
}

/// What the arrays of a listing hold together.
pub fn entries(mut bytes: &[u8]) -> Vec<Item> {
    let mut all = Vec::new();
    while !bytes.is_empty() {
        match Item::decode(&mut bytes) {
            Item::Array(entries) => all.extend(entries),
            other => panic!("{other:?}"),
        }
    }
    all
}

/// Processes with exactly this command line.
pub fn running(line: &str) -> usize {
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .filter(|found| String::from_utf8_lossy(found).trim_end_matches('\0').replace('\0', " ") == line)
        .count()
}

pub fn until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Raises a flag when it goes, however that comes.
pub struct Raise<'a>(pub &'a AtomicBool);

impl Drop for Raise<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

pub fn path(path: impl AsRef<[u8]>) -> Args {
    Args::new().bin("path", path)
}
