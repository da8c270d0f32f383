//! stub
use crate::conn::Stream;
use crate::daemon::Daemon;
use crate::errors::*;
use std::rc::Rc;
pub async fn export(_: &Daemon, _: &Rc<Stream>, _m: u64) -> crate::fsops::Answer {
    Err(Failure::new(Code::Unsupported, "later"))
}
pub async fn import(_: &Daemon, _: &Rc<Stream>, _m: u64) -> crate::fsops::Answer {
    Err(Failure::new(Code::Unsupported, "later"))
}
