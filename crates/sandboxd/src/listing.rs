//! Many small maps as a few DATA frames: each frame is one MessagePack array.

use crate::conn::{Gone, Stream};

/// Maps of one frame are put together up to this size. One map is at most two paths or a cut command line long, so a
/// frame stays below its cap.
const PIECE: usize = 32 << 10;

/// The maps of one frame.
#[derive(Default)]
pub struct Listing {
    count: u32,
    maps: Vec<u8>,
}

impl Listing {
    /// Add a map to the last frame of a list, or to a new one.
    pub fn add(frames: &mut Vec<Listing>, map: &[u8]) {
        if frames.last().is_none_or(|frame| frame.maps.len() + map.len() > PIECE) {
            frames.push(Listing::default());
        }
        if let Some(frame) = frames.last_mut() {
            frame.maps.extend_from_slice(map);
            frame.count += 1;
        }
    }

    fn array(&self) -> Vec<u8> {
        let mut array = Vec::with_capacity(5 + self.maps.len());
        // MessagePack's array 32: one form for every count.
        array.push(0xdd);
        array.extend_from_slice(&self.count.to_be_bytes());
        array.extend_from_slice(&self.maps);
        array
    }

    /// Send it on channel 1 once there is room.
    pub async fn send(&self, stream: &Stream) -> Result<(), Gone> {
        let array = self.array();
        stream.wait_room(array.len() + 1).await?;
        stream.send(1, &array);
        Ok(())
    }
}
