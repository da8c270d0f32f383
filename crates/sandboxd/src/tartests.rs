//! Archives there and back, and archives that mean harm.

use crate::errors::{Code, Failure};
use crate::tarfmt::{BLOCK, Header, Records, Time, kind, padding};
use crate::tarread::{Next, Reader};
use crate::tarsink::Stop;
use crate::wire::HEADER;
use crate::{tarin, tarout};
use proptest::prelude::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

const PLENTY: u64 = 1 << 40;

/// A directory with a workspace `w` in it, gone at the end.
struct Place(PathBuf);

impl Place {
    fn new() -> Place {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let place = std::env::temp_dir().join(format!("asb-tar-{}-{number}", std::process::id()));
        let _ = fs::remove_dir_all(&place);
        fs::create_dir_all(place.join("w")).unwrap();
        Place(place)
    }

    fn at(&self, name: &str) -> PathBuf {
        self.0.join("w").join(name)
    }

    fn open(&self) -> std::os::fd::OwnedFd {
        fs::File::open(self.at("")).unwrap().into()
    }

    fn export(&self, max_bytes: u64) -> (Result<tarout::Summary, Stop>, Vec<u8>) {
        self.export_within(max_bytes, 1 << 20)
    }

    fn export_within(&self, max_bytes: u64, table_bytes: usize) -> (Result<tarout::Summary, Stop>, Vec<u8>) {
        self.export_as(tarout::View::Tree, max_bytes, table_bytes)
    }

    fn export_as(
        &self,
        view: tarout::View,
        max_bytes: u64,
        table_bytes: usize,
    ) -> (Result<tarout::Summary, Stop>, Vec<u8>) {
        let (send, mut receive) = tokio::sync::mpsc::channel(4);
        let root = self.open();
        let thread = std::thread::spawn(move || tarout::export(root, view, max_bytes, table_bytes, 1, send));
        let mut archive = Vec::new();
        while let Some(frame) = receive.blocking_recv() {
            archive.extend_from_slice(&frame[HEADER + 1..]);
        }
        (thread.join().unwrap(), archive)
    }

    fn import(&self, archive: &[u8], piece: usize) -> Result<tarin::Summary, Failure> {
        tarin::import(self.open(), PLENTY, reader(archive, piece))
    }

    /// The whole archive must be refused and nothing may appear beside the workspace.
    fn refused(&self, archive: &[u8]) {
        let failure = match self.import(archive, 700) {
            Err(failure) => failure,
            Ok(summary) => panic!("{} entries were taken", summary.entries),
        };
        assert_eq!(failure.code, Code::InvalidRequest, "{failure:?}");
        assert_eq!(fs::read_dir(&self.0).unwrap().count(), 1);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = Command::new("rm").arg("-rf").arg(&self.0).status();
    }
}

fn reader(archive: &[u8], piece: usize) -> Reader {
    let mut pieces: Vec<Vec<u8>> = archive.chunks(piece).map(<[u8]>::to_vec).collect();
    pieces.reverse();
    Reader::new(move || pieces.pop().map_or(Next::Eof, Next::Data))
}

/// An archive made by hand.
#[derive(Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn entry(self, kind: u8, name: &str, link: &str, data: &[u8]) -> Tar {
        self.with(kind, name, link, data, Records::default())
    }

    fn with(mut self, kind: u8, name: &str, link: &str, data: &[u8], records: Records) -> Tar {
        let header = Header {
            kind,
            name: name.as_bytes(),
            link: link.as_bytes(),
            mode: 0o755,
            size: data.len() as u64,
            mtime: Time::default(),
        };
        header.write(&mut self.0, records);
        self.body(data)
    }

    /// A block of the plain format whose fields are then changed.
    fn raw(mut self, kind: u8, name: &str, data: &[u8], change: impl Fn(&mut [u8])) -> Tar {
        let mut blocks = Vec::new();
        let size = data.len() as u64;
        Header { kind, name: name.as_bytes(), link: b"", mode: 0o644, size, mtime: Time::default() }
            .write(&mut blocks, Records::default());
        change(&mut blocks);
        let sum: u64 = blocks
            .iter()
            .enumerate()
            .map(|(at, &b)| if (148..156).contains(&at) { 32 } else { u64::from(b) })
            .sum();
        blocks[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&blocks);
        self.body(data)
    }

    fn body(mut self, data: &[u8]) -> Tar {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len() + padding(data.len() as u64) as usize, 0);
        self
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

fn records(pairs: &[(&str, &[u8])]) -> Records {
    let mut records = Records::default();
    for (key, value) in pairs {
        records.push(key.as_bytes(), value);
    }
    records
}

fn set_mtime(path: &Path, seconds: i64, nanoseconds: i64) {
    let time = rustix::fs::Timespec { tv_sec: seconds, tv_nsec: nanoseconds };
    let times = rustix::fs::Timestamps { last_access: time, last_modification: time };
    let flags = rustix::fs::AtFlags::SYMLINK_NOFOLLOW;
    rustix::fs::utimensat(rustix::fs::CWD, path, &times, flags).unwrap();
}

#[test]
fn a_workspace_comes_back_as_it_was() {
    let (from, to) = (Place::new(), Place::new());
    let long = "l".repeat(200);
    fs::create_dir_all(from.at("d/empty")).unwrap();
    fs::create_dir_all(from.at(&long).join(&long)).unwrap();
    fs::write(from.at("d/file"), b"content").unwrap();
    fs::write(from.at(&long).join(&long).join("deep"), b"deep").unwrap();
    fs::write(from.0.join("w").join("new\nline é"), b"").unwrap();
    let strange = std::os::unix::ffi::OsStringExt::from_vec(b"byte \xff".to_vec());
    let strange: std::ffi::OsString = strange;
    fs::write(from.0.join("w").join(&strange), b"1").unwrap();
    fs::hard_link(from.at("d/file"), from.at("hard")).unwrap();
    for (name, target) in
        [("abs", "/etc/passwd"), ("dangling", "nowhere"), ("up", "../../.."), ("long", &long.repeat(3))]
    {
        symlink(target, from.at(name)).unwrap();
    }
    rustix::fs::mkfifoat(rustix::fs::CWD, from.at("fifo"), rustix::fs::Mode::RWXU).unwrap();
    for (name, mode) in [("suid", 0o4755), ("sgid", 0o2750), ("none", 0), ("d/sticky", 0o1777)] {
        fs::write(from.at(name), b"x").unwrap();
        fs::set_permissions(from.at(name), fs::Permissions::from_mode(mode)).unwrap();
    }
    let sparse = fs::File::create(from.at("sparse")).unwrap();
    sparse.set_len(10 << 30).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"in the middle", 5 << 30).unwrap();
    fs::File::create(from.at("hole")).unwrap().set_len(1 << 20).unwrap();
    let attributes =
        rustix::fs::setxattr(from.at("d/file"), "user.a=b%", b"v\0", rustix::fs::XattrFlags::empty());
    let listener = std::os::unix::net::UnixListener::bind(from.at("socket")).unwrap();
    fs::set_permissions(from.at("d"), fs::Permissions::from_mode(0o500)).unwrap();
    set_mtime(&from.at("d/file"), 981_173_106, 123_456_789);
    set_mtime(&from.at("dangling"), 1_000_000_000, 5);
    set_mtime(&from.at("suid"), -5, 500_000_000);
    set_mtime(&from.at("d"), 1_000_000_001, 7);
    set_mtime(&from.0.join("w"), 1_000_000_002, 9);

    let (summary, archive) = from.export(PLENTY);
    let summary = summary.unwrap();
    assert_eq!(summary.skipped_total, 1);
    assert_eq!(summary.skipped, [(b"socket".to_vec(), "a socket".to_string())]);
    assert!(archive.starts_with(b"././@PaxHeader\0"), "the workspace's own time has nanoseconds");
    assert_eq!(&archive[2 * BLOCK..2 * BLOCK + 3], b"./\0");
    assert!(archive.len() < 200_000, "holes are not written");
    let imported = to.import(&archive, 1_000).unwrap();
    assert_eq!((imported.entries, imported.file_bytes), (summary.entries, summary.file_bytes));
    assert_eq!(to.export(PLENTY).1, archive, "equal trees give equal archives");

    let stat = |name: &str| fs::symlink_metadata(to.at(name)).unwrap();
    assert_eq!(stat("hard").ino(), stat("d/file").ino());
    assert_eq!((stat("d/file").mtime(), stat("d/file").mtime_nsec()), (981_173_106, 123_456_789));
    assert_eq!((stat("suid").mtime(), stat("suid").mtime_nsec()), (-5, 500_000_000));
    assert_eq!((stat("suid").mode() & 0o7777, stat("d").mode() & 0o7777), (0o4755, 0o500));
    assert_eq!((stat("d").mtime_nsec(), stat("").mtime_nsec()), (7, 9));
    assert_eq!((stat("sparse").len(), stat("sparse").blocks() < 100), (10 << 30, true));
    assert_eq!(stat("hole").blocks(), 0);
    assert_eq!(fs::read_link(to.at("abs")).unwrap(), Path::new("/etc/passwd"));
    assert_eq!(fs::read(to.0.join("w").join(strange)).unwrap(), b"1");
    if attributes.is_ok() {
        let mut value = [0; 10];
        assert_eq!(rustix::fs::getxattr(to.at("d/file"), "user.a=b%", &mut value).unwrap(), 2);
    }
    drop(listener);
}

#[test]
fn export_stops_at_its_limit_and_when_nobody_listens() {
    let place = Place::new();
    fs::write(place.at("f"), vec![1; 5_000]).unwrap();
    assert!(place.export(5_000).0.is_ok());
    match place.export(4_999).0 {
        Err(Stop::Failed(failure)) => assert_eq!(failure.code, Code::TooLarge),
        _ => panic!("not refused"),
    }
    fs::write(place.at("g"), vec![1; 1 << 20]).unwrap();
    let (send, receive) = tokio::sync::mpsc::channel(1);
    drop(receive);
    assert!(matches!(
        tarout::export(place.open(), tarout::View::Tree, PLENTY, 1 << 20, 1, send),
        Err(Stop::Cancelled)
    ));
}

#[test]
fn names_and_links_stay_within_the_memory_for_them() {
    let refused = |place: &Place, table_bytes| match place.export_within(PLENTY, table_bytes).0 {
        Ok(_) => false,
        Err(Stop::Failed(failure)) => failure.code == Code::Exhausted,
        Err(stop) => panic!("{stop:?}"),
    };
    let place = Place::new();
    for n in 0..100 {
        fs::write(place.at(&format!("{n:0100}")), "").unwrap();
    }
    assert!(!refused(&place, 100 * 108));
    assert!(refused(&place, 100 * 108 - 1));
    let place = Place::new();
    for n in 0..100 {
        fs::write(place.at(&format!("{n}")), "").unwrap();
        fs::hard_link(place.at(&format!("{n}")), place.at(&format!("z{n}"))).unwrap();
    }
    assert!(!refused(&place, 20_000));
    assert!(refused(&place, 8_000));
}

#[test]
fn a_very_deep_tree_needs_few_descriptors() {
    let (from, to) = (Place::new(), Place::new());
    let script = "import os, sys\nos.chdir(sys.argv[1])\nfor i in range(3000):\n open('a', 'w').close()\n open('z', 'w').close()\n os.mkdir('dir')\n os.chdir('dir')\n";
    let made = Command::new("python3").args(["-c", script]).arg(from.at("")).status();
    if !made.is_ok_and(|status| status.success()) {
        // Without an interpreter the shell makes a shallower one.
        let script = "i=0; while [ $i -lt 500 ]; do : > a; : > z; mkdir dir; cd -P dir; i=$((i+1)); done";
        assert!(Command::new("sh").args(["-c", script]).current_dir(from.at("")).status().unwrap().success());
    }
    let (summary, archive) = from.export(PLENTY);
    assert_eq!(summary.unwrap().skipped_total, 0);
    to.import(&archive, 65_535).unwrap();
    assert!(to.export(PLENTY).1 == archive);
}

#[test]
fn a_tree_that_changes_meanwhile_gives_a_whole_archive() {
    let (from, to) = (Place::new(), Place::new());
    fs::create_dir(from.0.join("w/other")).unwrap();
    for n in 0..40 {
        fs::create_dir_all(from.at(&format!("d{n}/e"))).unwrap();
        fs::write(from.at(&format!("d{n}/e/f")), vec![1; 3_000]).unwrap();
    }
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in (0..40).cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let (d, file) = (from.at(&format!("d{n}")), from.at(&format!("d{n}/e/f")));
                let _ = fs::rename(from.at(&format!("d{n}/e")), from.at("other/e"));
                let _ = fs::rename(from.at("other/e"), from.at(&format!("d{n}/e")));
                let _ = fs::OpenOptions::new().write(true).open(&file).map(|file| file.set_len(n * 100));
                let _ = fs::remove_file(&file);
                let _ = symlink("/etc/passwd", &file);
                let _ = fs::remove_file(&file);
                let _ = fs::write(&file, vec![2; 4_000]);
                let _ = fs::rename(&d, from.at("moved"));
                let _ = fs::rename(from.at("moved"), &d);
            }
        });
        for _ in 0..30 {
            let (summary, archive) = from.export(PLENTY);
            assert!(summary.is_ok());
            assert!(!archive.windows(5).any(|part| part == b"root:"), "a link was followed");
            tarin::import(to.open(), PLENTY, reader(&archive, 9_999)).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn ordinary_archives_of_every_kind() {
    let place = Place::new();
    let archive = Tar::default()
        .raw(b'0', "v7", b"7", |block| block[257..].fill(0))
        .raw(0, "v7dir/", b"", |block| block[257..].fill(0))
        .raw(b'0', "name", b"prefix", |block| block[345..351].copy_from_slice(b"a/long"))
        .raw(b'0', "gnu", b"g", |block| {
            block[257..265].copy_from_slice(b"ustar  \0");
            block[345..350].copy_from_slice(b"12345");
        })
        .raw(b'L', "././@LongLink", &[&[b'n'; 150][..], b"\0"].concat(), |_| {})
        .raw(b'0', "short", b"long", |_| {})
        .raw(b'K', "././@LongLink", &[&[b't'; 150][..], b"\0"].concat(), |_| {})
        .raw(b'2', "longlink", b"", |_| {})
        .raw(b'g', "pax_global_header", &global(b"comment", b"of git"), |_| {})
        .raw(b'0', "base256", b"12345", |block| {
            block[124..136].copy_from_slice(b"\x80\0\0\0\0\0\0\0\0\0\0\x05");
        })
        .raw(b'7', "contiguous", b"c", |_| {})
        .raw(b'3', "device", b"", |_| {})
        .with(b'0', "x", "", b"", records(&[("path", b"from-pax"), ("mtime", b"1.5")]))
        .entry(kind::HARD_LINK, "second", "./v7", b"")
        .raw(b'V', "label", b"", |_| {})
        .end();
    for piece in [1, 511, 10_000] {
        place.import(&archive, piece).unwrap();
        for (name, content) in
            [("v7", "7"), ("a/long/name", "prefix"), ("gnu", "g"), ("base256", "12345"), ("second", "7")]
        {
            assert_eq!(fs::read_to_string(place.at(name)).unwrap(), content, "{name}");
        }
        assert!(place.at("v7dir").is_dir() && place.at(&"n".repeat(150)).is_file());
        assert_eq!(fs::read_link(place.at("longlink")).unwrap().as_os_str().len(), 150);
        assert_eq!(fs::metadata(place.at("from-pax")).unwrap().mtime_nsec(), 500_000_000);
        assert!(!place.at("device").exists() && !place.at("label").exists());
    }
}

fn global(key: &[u8], value: &[u8]) -> Vec<u8> {
    let length = key.len() + value.len() + 5;
    [format!("{length} ").as_bytes(), key, b"=", value, b"\n"].concat()
}

#[test]
fn names_that_lead_out_are_refused() {
    for name in ["/abs", "..", "../x", "a/../../x", "a/..", "/", "//etc/x"] {
        let place = Place::new();
        place.refused(&Tar::default().entry(kind::FILE, name, "", b"evil").end());
        place.refused(&Tar::default().entry(kind::DIRECTORY, name, "", b"").end());
        place.refused(
            &Tar::default().with(kind::FILE, "x", "", b"evil", records(&[("path", name.as_bytes())])).end(),
        );
        place.refused(
            &Tar::default().entry(kind::FILE, "ok", "", b"").entry(kind::HARD_LINK, "l", name, b"").end(),
        );
    }
    let place = Place::new();
    for (key, value) in [("path", &b"a\0b"[..]), ("GNU.sparse.name", b"/x")] {
        place.refused(&Tar::default().with(kind::FILE, "x", "", b"", records(&[(key, value)])).end());
    }
    place.refused(&Tar::default().entry(kind::FILE, ".", "", b"").end());
    place.refused(&Tar::default().entry(kind::HARD_LINK, "passwd", "etc/passwd", b"").end());
}

#[test]
fn links_of_the_archive_are_not_followed() {
    let place = Place::new();
    fs::create_dir(place.0.join("w/inside")).unwrap();
    for target in ["/tmp", "..", "inside"] {
        let archive = Tar::default()
            .entry(kind::SYMLINK, "link", target, b"")
            .entry(kind::FILE, "link/file", "", b"evil")
            .end();
        place.refused(&archive);
        let archive = Tar::default()
            .entry(kind::SYMLINK, "link", target, b"")
            .entry(kind::HARD_LINK, "hard", "link/x", b"")
            .end();
        place.refused(&archive);
    }
    // A file replaces a link of its own name, and a directory does too.
    let outside = place.0.join("outside");
    fs::write(&outside, b"mine").unwrap();
    let archive = Tar::default()
        .entry(kind::SYMLINK, "a", "../outside", b"")
        .entry(kind::FILE, "a", "", b"new")
        .entry(kind::SYMLINK, "b", "..", b"")
        .entry(kind::DIRECTORY, "b", "", b"")
        .entry(kind::FILE, "b/c", "", b"new")
        .entry(kind::SYMLINK, "s", "../outside", b"")
        .entry(kind::HARD_LINK, "h", "s", b"")
        .end();
    place.import(&archive, 512).unwrap();
    assert_eq!(fs::read(&outside).unwrap(), b"mine");
    assert_eq!(fs::metadata(&outside).unwrap().nlink(), 1);
    assert_eq!(fs::read(place.at("a")).unwrap(), b"new");
    assert_eq!(fs::read(place.at("b/c")).unwrap(), b"new");
    assert!(fs::symlink_metadata(place.at("h")).unwrap().is_symlink());
}

#[test]
fn malformed_archives_are_refused() {
    let sparse = |map: &[u8], real: &str| {
        let pairs: [(&str, &[u8]); 4] = [
            ("GNU.sparse.major", b"1"),
            ("GNU.sparse.minor", b"0"),
            ("GNU.sparse.name", b"s"),
            ("GNU.sparse.realsize", real.as_bytes()),
        ];
        let mut data = map.to_vec();
        data.resize(512, 0);
        data.extend_from_slice(b"0123456789");
        Tar::default().with(kind::FILE, "x", "", &data, records(&pairs)).end()
    };
    let good = Tar::default().entry(kind::FILE, "f", "", &[1; 2_000]).end();
    let place = Place::new();
    place.import(&sparse(b"1\n5\n10\n", "15"), 100).unwrap();
    assert_eq!(fs::read(place.at("s")).unwrap(), b"\0\0\0\0\x000123456789");
    for archive in [
        Vec::new(),
        vec![0; 1_024],
        b"not an archive".repeat(100),
        good[..1_500].to_vec(),
        good[..2_560].to_vec(),
        good[..700].to_vec(),
        sparse(b"1\n5\n10\n", "14"),
        sparse(b"1\n5\n11\n", "100"),
        sparse(b"2\n5\n5\n7\n5\n", "100"),
        sparse(b"2\n50\n5\n7\n5\n", "100"),
        sparse(b"1\n18446744073709551615\n10\n", "100"),
        sparse(b"99999999\n", "100"),
        sparse(b"x\n", "100"),
        sparse(&[b'1'; 512], "100"),
        Tar::default().with(kind::FILE, "x", "", b"", records(&[("size", b"99999999999999999999")])).end(),
        Tar::default().with(kind::FILE, "x", "", b"", records(&[("size", b"-1")])).end(),
        Tar::default().with(kind::FILE, "x", "", b"", records(&[("GNU.sparse.map", b"0,1")])).end(),
        Tar::default().with(kind::FILE, "x", "", b"", records(&[("mtime", b"now")])).end(),
        Tar::default().raw(b'x', "x", b"7 a=b\nrubbish", |_| {}).raw(b'0', "f", b"", |_| {}).end(),
        Tar::default().raw(b'g', "x", &global(b"path", b"p"), |_| {}).raw(b'0', "f", b"", |_| {}).end(),
        Tar::default().raw(b'x', "x", &vec![0; (1 << 20) + 1], |_| {}).end(),
        Tar::default().raw(b'L', "x", &vec![b'a'; (1 << 20) + 1], |_| {}).end(),
        Tar::default().raw(b'x', "x", &global(b"path", b"p"), |_| {}).end(),
        Tar::default().raw(b'S', "old-sparse", b"", |_| {}).end(),
        Tar::default().raw(b'Z', "unknown", b"", |_| {}).end(),
        Tar::default().raw(b'0', "negative", b"", |block| block[124..136].fill(0xff)).end(),
        Tar::default().entry(kind::SYMLINK, "empty", "", b"").end(),
        Tar::default().entry(kind::FILE, "f", "", b"").entry(kind::HARD_LINK, "f", "./f", b"").end(),
        Tar::default().entry(kind::FILE, "f", "", b"").entry(kind::FILE, "f/g", "", b"").end(),
        Tar::default().entry(kind::FILE, "d/f", "", b"").entry(kind::FILE, "d", "", b"").end(),
    ] {
        Place::new().refused(&archive);
    }
}

#[test]
fn import_stops_at_its_limit() {
    let place = Place::new();
    let archive =
        Tar::default().entry(kind::FILE, "a", "", &[1; 600]).entry(kind::FILE, "b", "", &[1; 600]).end();
    assert!(tarin::import(place.open(), 1_200, reader(&archive, 512)).is_ok());
    let failure = tarin::import(place.open(), 1_199, reader(&archive, 512)).err().unwrap();
    assert_eq!(failure.code, Code::TooLarge);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    /// One changed byte anywhere never leads out of the workspace and never ends the process.
    #[test]
    fn a_damaged_archive_is_survived(at in 0usize..6_000, byte in any::<u8>(), piece in 1usize..700) {
        let place = Place::new();
        let mut archive = Tar::default()
            .entry(kind::DIRECTORY, "d/", "", b"")
            .with(kind::FILE, "d/f", "", b"data", records(&[("path", b"d/f"), ("SCHILY.xattr.user.k", b"v")]))
            .entry(kind::SYMLINK, "l", "/etc", b"")
            .raw(b'L', "x", b"d/long\0", |_| {})
            .entry(kind::FILE, "s", "", &[5; 600])
            .end();
        let length = archive.len();
        archive[at % length] = byte;
        let _ = place.import(&archive, piece);
        prop_assert_eq!(fs::read_dir(&place.0).unwrap().count(), 1);
    }
}

fn names(archive: &[u8]) -> Vec<String> {
    let mut listing = Command::new("tar");
    listing.args(["-tf", "-"]).stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::piped());
    let mut child = listing.spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), archive).unwrap();
    let said = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    said.lines().map(str::to_string).collect()
}

/// What the kernel's overlay puts where it hides a name; anybody may make it (mknod(2)).
fn hide(place: &Place, name: &str) {
    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    mknodat(CWD, place.at(name), FileType::CharacterDevice, Mode::empty(), makedev(0, 0)).unwrap();
}

#[test]
fn what_an_upper_directory_hides_becomes_a_whiteout() {
    let place = Place::new();
    fs::create_dir(place.at("d")).unwrap();
    hide(&place, "gone");
    hide(&place, "d/gone");
    let _socket = std::os::unix::net::UnixListener::bind(place.at("socket")).unwrap();
    fs::write(place.at("one"), b"1").unwrap();
    fs::hard_link(place.at("one"), place.at("two")).unwrap();
    let (summary, archive) = place.export_as(tarout::View::Changes, PLENTY, 1 << 20);
    let summary = summary.unwrap();
    // A socket is in no state, and hides what was in its place all the same.
    assert_eq!(summary.skipped, [(b"socket".to_vec(), "a socket".to_string())]);
    assert_eq!(summary.file_bytes, 1);
    assert_eq!(names(&archive), ["./", "d/", "d/.wh.gone", ".wh.gone", "one", ".wh.socket", "two"]);
    // The same as a tree has devices and sockets, which are left out, and hides nothing.
    let (_, archive) = place.export(PLENTY);
    assert_eq!(names(&archive), ["./", "d/", "one", "two"]);
}

#[test]
fn what_a_layer_cannot_say_is_refused_before_a_byte() {
    let refused = |place: &Place, why: &str| {
        let (result, archive) = place.export_as(tarout::View::Changes, PLENTY, 1 << 20);
        match result {
            Err(Stop::Failed(failure)) => {
                assert_eq!(failure.code, Code::Conflict);
                assert!(failure.message.contains(why), "{failure:?}");
            }
            _ => panic!("it was not refused: {why}"),
        }
        assert!(archive.is_empty());
    };
    let place = Place::new();
    fs::write(place.at("a"), b"before").unwrap();
    fs::write(place.at(".wh.f"), b"").unwrap();
    refused(&place, "would be a whiteout");
    fs::remove_file(place.at(".wh.f")).unwrap();
    // The kernel's index of linked files has a name of each that was changed.
    fs::hard_link(place.at("a"), place.0.join("index")).unwrap();
    refused(&place, "has names among the layers");
    fs::remove_file(place.0.join("index")).unwrap();
    let longest = "x".repeat(255);
    hide(&place, &longest);
    refused(&place, "too long for a whiteout");
    fs::remove_file(place.at(&longest)).unwrap();
    place.export_as(tarout::View::Changes, PLENTY, 1 << 20).0.unwrap();
}
