//! Which processes are children of this one.
//!
//! The kernel keeps the list in `/proc/self/task/<tid>/children`. Where that file is missing every process in
//! `/proc` is asked for its parent instead. Both ways make system calls only and allocate nothing: the
//! supervisor uses them after a fork, and a sandbox whose processes or memory have run out must still be
//! killable. The list may miss a child that appears while it is read, so callers repeat until there is none.
//! [`everything`] is for those who need grandchildren too.

use libc::{c_char, c_int, pid_t};

/// A path put together without allocation, always NUL-terminated.
struct Path {
    bytes: [u8; 64],
    len: usize,
}

impl Path {
    fn new() -> Path {
        Path { bytes: [0; 64], len: 0 }
    }

    fn text(mut self, text: &[u8]) -> Path {
        for &byte in text {
            if self.len + 1 < self.bytes.len() {
                self.bytes[self.len] = byte;
                self.len += 1;
            }
        }
        self
    }

    fn number(self, n: pid_t) -> Path {
        let mut digits = [0u8; 12];
        let (mut at, mut rest) = (digits.len(), n.max(0));
        loop {
            at -= 1;
            digits[at] = b'0' + (rest % 10) as u8;
            rest /= 10;
            if rest == 0 {
                break;
            }
        }
        self.text(&digits[at..])
    }

    fn open(&self, flags: c_int) -> c_int {
        // SAFETY: the bytes end with a NUL, since `text` leaves room for one and the array began as zeros.
        unsafe { libc::open(self.bytes.as_ptr().cast::<c_char>(), flags | libc::O_CLOEXEC) }
    }
}

/// Call `each` with every child of the calling thread.
pub fn for_each(mut each: impl FnMut(pid_t)) {
    // SAFETY: a system call without arguments.
    let own = unsafe { libc::syscall(libc::SYS_gettid) } as pid_t;
    let list = Path::new().text(b"/proc/self/task/").number(own).text(b"/children").open(libc::O_RDONLY);
    if list < 0 {
        by_parent(&mut each);
        return;
    }
    let mut buffer = [0u8; 4_096];
    let mut pid: pid_t = 0;
    loop {
        let count = read(list, &mut buffer);
        if count == 0 {
            break;
        }
        for &byte in &buffer[..count] {
            if byte.is_ascii_digit() {
                pid = pid.wrapping_mul(10).wrapping_add(pid_t::from(byte - b'0'));
            } else if pid > 0 {
                each(pid);
                pid = 0;
            }
        }
    }
    if pid > 0 {
        each(pid);
    }
    // SAFETY: the descriptor was opened above and is used no more.
    unsafe { libc::close(list) };
}

fn read(fd: c_int, buffer: &mut [u8]) -> usize {
    // SAFETY: the kernel writes at most the buffer's length into it.
    let count = unsafe { libc::read(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    usize::try_from(count).unwrap_or(0)
}

/// The slow way: look at the parent of everything in `/proc`.
fn by_parent(each: &mut impl FnMut(pid_t)) {
    // SAFETY: a system call without arguments.
    let own = unsafe { libc::getpid() };
    everything(|pid, seen| {
        if seen.parent == own {
            each(pid);
        }
    });
}

/// What `/proc` says of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    pub parent: pid_t,
    /// It has ended, or its first thread has.
    pub zombie: bool,
    /// When it began, in hundredths of a second since the system did.
    pub began: u64,
}

/// Call `each` with every process that `/proc` shows.
pub fn everything(mut each: impl FnMut(pid_t, Seen)) {
    let proc = Path::new().text(b"/proc").open(libc::O_RDONLY | libc::O_DIRECTORY);
    if proc < 0 {
        return;
    }
    let mut buffer = [0u8; 4_096];
    loop {
        // SAFETY: the kernel writes at most the buffer's length into it.
        let count = unsafe { libc::syscall(libc::SYS_getdents64, proc, buffer.as_mut_ptr(), buffer.len()) };
        let count = usize::try_from(count).unwrap_or(0);
        if count == 0 {
            break;
        }
        let mut records = &buffer[..count];
        // struct linux_dirent64: ino 8, off 8, reclen 2, type 1, name.
        while let Some(&[low, high]) = records.get(16..18) {
            let length = usize::from(u16::from_ne_bytes([low, high]));
            let Some((record, rest)) = records.split_at_checked(length) else { break };
            if length < 19 {
                break;
            }
            records = rest;
            if let Some(pid) = number(&record[19..])
                && let Some(seen) = look(pid)
            {
                each(pid, seen);
            }
        }
    }
    // SAFETY: the descriptor was opened above and is used no more.
    unsafe { libc::close(proc) };
}

/// The decimal number at the start of a NUL-terminated name that is nothing else.
fn number(name: &[u8]) -> Option<pid_t> {
    let digits = name.split(|&byte| byte == 0).next().unwrap_or(&[]);
    if digits.is_empty() || digits.len() > 9 || !digits.iter().all(u8::is_ascii_digit) {
        return None;
    }
    Some(digits.iter().fold(0, |n, &byte| n * 10 + pid_t::from(byte - b'0')))
}

/// The third, fourth and 22nd field of `/proc/PID/stat`. The second is a name in brackets that may hold anything, so the
/// last closing bracket counts. `None` when there is no such process, or it is hidden.
pub fn look(pid: pid_t) -> Option<Seen> {
    let stat = Path::new().text(b"/proc/").number(pid).text(b"/stat").open(libc::O_RDONLY);
    if stat < 0 {
        return None;
    }
    let mut buffer = [0u8; 512];
    let count = read(stat, &mut buffer);
    // SAFETY: the descriptor was opened above and is used no more.
    unsafe { libc::close(stat) };
    let text = &buffer[..count];
    let after = text.iter().rposition(|&byte| byte == b')')?;
    let mut fields = text[after + 1..].split(|&byte| byte == b' ').filter(|field| !field.is_empty());
    let zombie = matches!(fields.next()?, b"Z" | b"X");
    let parent = number(fields.next()?)?;
    let digits = fields.nth(17).unwrap_or(&[]);
    let began = digits.iter().fold(0u64, |n, &byte| n.wrapping_mul(10).wrapping_add(u64::from(byte & 15)));
    Some(Seen { parent, zombie, began })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_see_the_same_children() {
        let mut children: Vec<_> =
            (0..3).map(|_| std::process::Command::new("sleep").arg("30").spawn().unwrap()).collect();
        let mut expected: Vec<pid_t> = children.iter().map(|child| child.id() as pid_t).collect();
        let (mut listed, mut asked) = (Vec::new(), Vec::new());
        for_each(|pid| listed.push(pid));
        by_parent(&mut |pid| asked.push(pid));
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        expected.sort_unstable();
        listed.sort_unstable();
        assert_eq!(listed, expected);
        // Other tests of this process may have children of their own meanwhile.
        assert!(expected.iter().all(|pid| asked.contains(pid)), "{asked:?} lacks one of {expected:?}");
    }
}
