//! Ports and sockets carried over the wire.

use crate::client::{Args, Host, Item, path};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::thread;

fn port(listener: &TcpListener) -> Args {
    Args::new().uint("port", listener.local_addr().unwrap().port().into())
}

#[test]
fn bytes_go_both_ways_and_each_way_ends_by_itself() {
    let host = Host::start();
    let mut client = host.connect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let args = port(&listener);
    let bytes: Vec<u8> = (0..2_000_000u32).map(|n| (n ^ n >> 8) as u8).collect();
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut got = Vec::new();
        socket.read_to_end(&mut got).unwrap();
        // The client has ended its direction; this one goes on.
        socket.write_all(&got).unwrap();
        got.len()
    });
    let id = client.open("net.dial", &args);
    assert_eq!(client.note(id).get("connected"), Some(&Item::Bool(true)));
    assert!(client.upload(id, 0, &bytes));
    client.eof(id);
    let done = client.finish(id);
    assert!(done.out == bytes);
    assert_eq!((done.end.int("sent"), done.end.int("received")), (Some(2_000_000), Some(2_000_000)));
    assert_eq!(done.end.get("reset"), None);
    assert_eq!(server.join().unwrap(), 2_000_000);
}

#[test]
fn the_other_side_may_end_first() {
    let host = Host::start();
    let mut client = host.connect();
    let listener = TcpListener::bind("[::1]:0").unwrap();
    let args = port(&listener);
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        socket.write_all(b"greeting").unwrap();
        socket.shutdown(std::net::Shutdown::Write).unwrap();
        let mut got = String::new();
        socket.read_to_string(&mut got).unwrap();
        got
    });
    let id = client.open("net.dial", &args);
    client.note(id);
    assert_eq!(client.output_with(id, "greeting"), "greeting");
    assert_eq!(client.next_of(id), (4, id, vec![1]), "EOF on channel 1");
    client.upload(id, 0, b"answer");
    client.eof(id);
    assert_eq!(client.finish(id).end.int("sent"), Some(6));
    assert_eq!(server.join().unwrap(), "answer");
}

#[test]
fn nobody_there_and_those_who_go_away() {
    let host = Host::start();
    let mut client = host.connect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let args = port(&listener);
    drop(listener);
    assert_eq!(client.call("net.dial", &args).end.error(), "not_found");
    for args in [
        Args::new(),
        Args::new().uint("port", 0),
        Args::new().uint("port", 65_536),
        Args::new().uint("port", 80).bin("path", "/x"),
        path("relative"),
    ] {
        assert_eq!(client.call("net.dial", &args).end.error(), "invalid_request");
    }
    // A listener that closes right after it accepted, or with what it was sent unread: an end, or a reset.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let args = port(&listener);
    let server = thread::spawn(move || {
        for _ in 0..20 {
            drop(listener.accept().unwrap());
        }
    });
    for n in 0..20 {
        let id = client.open("net.dial", &args);
        client.note(id);
        if n % 2 == 0 {
            client.upload(id, 0, &[1; 100_000]);
        }
        client.eof(id);
        let end = client.finish(id).end;
        assert_eq!((end.error(), end.int("received")), ("", Some(0)), "{end:?}");
    }
    server.join().unwrap();
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
}

#[test]
fn a_reset_closes_the_socket_and_a_slow_reader_grows_nothing() {
    let host = Host::start();
    let mut client = host.connect();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let args = port(&listener);
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        while socket.write_all(&[0; 65_536]).is_ok() {}
    });
    let id = client.open("net.dial", &args);
    client.note(id);
    let before = host.status("VmRSS:");
    thread::sleep(std::time::Duration::from_millis(200));
    assert!(host.status("VmRSS:") < before + 500);
    client.reset(id);
    server.join().unwrap();
}

#[test]
fn a_unix_socket_is_opened_as_the_sandbox_user() {
    let host = Host::start();
    let mut client = host.connect();
    let deep = host.file(&"d".repeat(120));
    std::fs::create_dir(&deep).unwrap();
    let place = deep.join("socket");
    // Longer than the address of a socket may be.
    std::env::set_current_dir(&deep).unwrap();
    let listener = UnixListener::bind("socket").unwrap();
    std::env::set_current_dir("/").unwrap();
    let at = path(place.to_str().unwrap());
    assert_eq!(client.call("net.dial", &at).end.error(), "permission", "it is root's");
    std::os::unix::fs::chown(&place, Some(host.uid), Some(host.uid)).unwrap();
    let server = thread::spawn(move || {
        let (mut socket, _) = listener.accept().unwrap();
        let mut got = String::new();
        socket.read_to_string(&mut got).unwrap();
        socket.write_all(got.to_uppercase().as_bytes()).unwrap();
        // SAFETY: the structure is of the size that the call is told, and the kernel fills it.
        let peer = unsafe {
            let mut peer: libc::ucred = std::mem::zeroed();
            let mut size = size_of::<libc::ucred>() as libc::socklen_t;
            let fd = std::os::fd::AsRawFd::as_raw_fd(&socket);
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_PEERCRED, (&raw mut peer).cast(), &raw mut size);
            peer
        };
        peer.uid
    });
    let id = client.open("net.dial", &at);
    client.note(id);
    client.upload(id, 0, b"abc");
    client.eof(id);
    assert_eq!(client.finish(id).out, b"ABC");
    assert_eq!(server.join().unwrap(), host.uid);
    assert_eq!(client.call("net.dial", &at).end.error(), "not_found", "nobody listens any more");
    assert_eq!(client.call("net.dial", &path("/etc/passwd")).end.error(), "invalid_request");
    assert_eq!(client.call("net.dial", &path("/no/such")).end.error(), "not_found");
}

#[test]
fn the_daemons_own_socket_is_out_of_reach() {
    for host in [Host::start(), Host::start_by_path()] {
        let mut client = host.connect();
        let socket = host.socket.clone().into_os_string().into_encoded_bytes();
        std::fs::set_permissions(&host.socket, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        assert_eq!(client.call("net.dial", &path(&socket)).end.error(), "permission");
        std::os::unix::fs::symlink(&host.socket, host.file("link")).unwrap();
        assert_eq!(client.call("net.dial", &path(host.at("link"))).end.error(), "permission");
    }
}
