//! The built daemon, on this host, as root, against a client of its own.

mod changes;
mod client;
mod commands;
mod connections;
mod dial;
mod files;
mod objects;
mod stdin;
mod terminals;
mod watches;
