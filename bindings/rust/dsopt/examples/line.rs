// SPDX-License-Identifier: Apache-2.0
//! Linear regression, y = 2 x0 - 3 x1 + 1, with AdamW; a checkpoint in the middle.
use dsopt::{AdamW, Context, Dtype, LoadOptions, Optimizer, Param, TensorMut};
use std::io::Cursor;

fn optimizer(ctx: &Context) -> dsopt::Result<Optimizer> {
    let mut opt = Optimizer::builder(ctx).max_norm(10.0).build()?;
    let params = [Param::shaped("w", Dtype::F32, &[1, 2]), Param::new("b", Dtype::F32, 1)];
    opt.add_group(&AdamW { lr: 0.02, weight_decay: 0.0, ..Default::default() }, &params)?;
    Ok(opt)
}

fn main() -> dsopt::Result<()> {
    let ctx = Context::cpu()?;
    let mut opt = optimizer(&ctx)?;
    let (mut w, mut b) = ([0.0f32; 2], [0.0f32]);
    let mut checkpoint = Vec::new();
    for i in 0..4000 {
        let x = [(i % 7) as f32 / 7.0, (i % 5) as f32 / 5.0];
        let error = w[0] * x[0] + w[1] * x[1] + b[0] - (2.0 * x[0] - 3.0 * x[1] + 1.0);
        let (gw, gb) = ([error * x[0], error * x[1]], [error]);

        // Borrowed for this call only. Lists are in the order of registration.
        opt.step(&mut [(&mut w).into(), (&mut b).into()], &[(&gw).into(), (&gb).into()])?;

        if i == 2000 {
            opt.save_to(&mut checkpoint, &[(&w).into(), (&b).into()])?;
            opt = optimizer(&ctx)?;
            let mut params: [TensorMut; 2] = [(&mut w).into(), (&mut b).into()];
            opt.load_from(&mut [Cursor::new(&checkpoint)], LoadOptions::default(), &mut params)?;
        }
    }
    println!("{:.2} {:.2} {:.2} after {} steps", w[0], w[1], b[0], opt.report()?.calls);

    // Errors name the cause.
    let error = opt.step(&mut [(&mut w).into(), (&mut b).into()], &[(&[0.0f32; 3]).into(), (&[0.0f32]).into()]);
    println!("{}", error.unwrap_err());
    Ok(())
}
