"""Training over many devices: meshes, shardings, and the pipeline of block representations.

    mesh = make_mesh(MeshConfig(stage=4))
    plan = make_plan(model_config, mesh, PipelineConfig(virtual_stages=2, microbatches=16))
    params, shardings = sharded_init(partial(new_params, plan), mesh)
    nats, weight = jax.jit(make_loss(plan))(params, tokens_bt)

`plan.schedule`, `plan.partition` and `plan.payload` are plain data: who does what at each tick, on
which sub-layers, and what each hop carries.
"""

from attnres_jax.parallel.collectives import Collective as Collective
from attnres_jax.parallel.collectives import collectives_of_hlo as collectives_of_hlo
from attnres_jax.parallel.collectives import collectives_of_jaxpr as collectives_of_jaxpr
from attnres_jax.parallel.collectives import total_bytes as total_bytes
from attnres_jax.parallel.cross_stage import Payload as Payload
from attnres_jax.parallel.language_model import make_loss as make_loss
from attnres_jax.parallel.layout import to_layer_order as to_layer_order
from attnres_jax.parallel.layout import to_pipeline as to_pipeline
from attnres_jax.parallel.mesh import AXES as AXES
from attnres_jax.parallel.mesh import BATCH_AXES as BATCH_AXES
from attnres_jax.parallel.mesh import MeshConfig as MeshConfig
from attnres_jax.parallel.mesh import make_mesh as make_mesh
from attnres_jax.parallel.partition import Partition as Partition
from attnres_jax.parallel.pipeline import EXECUTORS as EXECUTORS
from attnres_jax.parallel.plan import PipelineConfig as PipelineConfig
from attnres_jax.parallel.plan import Plan as Plan
from attnres_jax.parallel.plan import abstract_params as abstract_params
from attnres_jax.parallel.plan import make_plan as make_plan
from attnres_jax.parallel.plan import new_params as new_params
from attnres_jax.parallel.schedules import Schedule as Schedule
from attnres_jax.parallel.sharding import RULES as RULES
from attnres_jax.parallel.sharding import axis_letters as axis_letters
from attnres_jax.parallel.sharding import check_divisible as check_divisible
from attnres_jax.parallel.sharding import names_of as names_of
from attnres_jax.parallel.sharding import parameter_shardings as parameter_shardings
from attnres_jax.parallel.sharding import parameter_specs as parameter_specs
from attnres_jax.parallel.sharding import partition_spec as partition_spec
from attnres_jax.parallel.sharding import sharded_init as sharded_init
from attnres_jax.parallel.tables import format_table as format_table
