//! Host memory that is filled again while it is being copied to the device.

use ascend_attention::{Error, HostBuffer, Stream, Tensor};

fn refill(stream: &Stream, tensor: &Tensor<i32>, mut host: HostBuffer<i32>) -> Result<(), Error> {
    let copy = tensor.overwrite_async(stream, host)?;
    host[0] = 7;
    copy.wait()?;
    Ok(())
}

fn main() {}
