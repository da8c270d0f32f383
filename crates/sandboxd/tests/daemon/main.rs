//! The built daemon, on this host, as root, against a client of its own.

mod client;
mod commands;
mod connections;
mod files;
mod objects;
mod stdin;
