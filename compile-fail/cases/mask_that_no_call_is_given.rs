//! A mask that is made and forgotten.

#![deny(unused_must_use)]

use ascend_attention::{CausalOrigin, Device, Error, Mask};

fn forgotten(device: &Device) -> Result<(), Error> {
    device.masks().causal(CausalOrigin::RightDown)?;
    Mask::none();
    Ok(())
}

fn main() {}
