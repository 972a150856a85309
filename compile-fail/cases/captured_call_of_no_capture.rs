//! A launch into a graph whose capture is over.

use ascend_attention::{Device, Graph, Result};

fn escape(device: &Device) -> Result<()> {
    let mut kept = None;
    Graph::capture(device, (), |capture, ()| {
        kept = Some(capture);
        Ok(())
    })?;
    Ok(())
}

fn main() {}
