//! The hello: both sides prove the key and agree on a generation.

use super::{Connection, GENERATION, Kind, Phase, ProtocolError, Role, Step, wrong};
use crate::pack::MapWriter;
use hmac::{Hmac, Mac};
use sha2::Sha256;
use std::ops::Range;

impl Connection {
    fn proof(&self, role: &str) -> Hmac<Sha256> {
        let (client, daemon) = match self.role {
            Role::Client => (&self.nonce, &self.peer_nonce),
            Role::Daemon => (&self.peer_nonce, &self.nonce),
        };
        let mut mac = Hmac::<Sha256>::new_from_slice(&self.key).expect("HMAC takes keys of every length");
        mac.update(role.as_bytes());
        mac.update(&self.generation.to_be_bytes());
        mac.update(client);
        mac.update(daemon);
        mac
    }

    pub(super) fn on_hello(&mut self, payload: Range<usize>) -> Result<Step, ProtocolError> {
        let map = self.map(&payload, Kind::Hello)?;
        let proof = map.bin("proof").map(<[u8]>::to_vec);
        if self.phase == Phase::Proof {
            let Some(proof) = proof.filter(|proof| proof.len() == 32) else {
                return wrong("HELLO without a proof of 32 bytes");
            };
            let clock = map.uint("clock_ns");
            let step = self.verified("client", &proof)?;
            self.clock_ns = clock;
            return Ok(step);
        }
        let (Some(generation), Some(nonce)) = (map.uint("generation"), map.bin("nonce")) else {
            return wrong("HELLO without generation and nonce");
        };
        let Ok(nonce) = <[u8; 32]>::try_from(nonce) else {
            return wrong("HELLO with a nonce that is not 32 bytes");
        };
        let Ok(generation) = u32::try_from(generation) else {
            return wrong("HELLO with a generation above 32 bits");
        };
        self.peer_nonce = nonce;
        // Both sides speak their newest generation and the one before.
        let chosen = generation.min(GENERATION);
        let oldest = generation.max(GENERATION).saturating_sub(1).max(1);
        match self.role {
            Role::Daemon if chosen < oldest => Err(ProtocolError {
                code: "generation",
                message: format!("this daemon speaks generation {GENERATION}"),
            }),
            Role::Daemon => {
                self.generation = chosen;
                let proof = self.proof("daemon").finalize().into_bytes();
                let hello = MapWriter::new(3)
                    .uint("generation", u64::from(chosen))
                    .bin("nonce", &self.nonce)
                    .bin("proof", &proof)
                    .done();
                self.send(Kind::Hello, 0, &hello);
                self.phase = Phase::Proof;
                Ok(Step::Nothing)
            }
            Role::Client => {
                let Some(proof) = proof.filter(|proof| proof.len() == 32) else {
                    return wrong("HELLO without a proof of 32 bytes");
                };
                if generation > GENERATION || chosen < oldest {
                    return Err(ProtocolError {
                        code: "unauthorized",
                        message: format!("the daemon chose generation {generation}"),
                    });
                }
                self.generation = generation;
                self.verified("daemon", &proof)
            }
        }
    }

    fn verified(&mut self, role: &str, proof: &[u8]) -> Result<Step, ProtocolError> {
        // `verify_slice` takes the same time for every wrong proof.
        if self.proof(role).verify_slice(proof).is_err() {
            return Err(ProtocolError {
                code: "unauthorized",
                message: format!("the {role}'s proof is wrong"),
            });
        }
        if self.role == Role::Client {
            let proof = self.proof("client").finalize().into_bytes();
            self.send(Kind::Hello, 0, &MapWriter::new(1).bin("proof", &proof).done());
        }
        self.phase = Phase::Open;
        Ok(Step::Ready)
    }
}
