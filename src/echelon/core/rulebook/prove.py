# SPDX-License-Identifier: Apache-2.0
"""Rules of a proof: the claims in the order of causes, whole runs, who may use memory when."""

from echelon.core.rules import Area, Rule

PROVE_QUANTISED_SUMS = Rule(
    id="prove-quantised-sums",
    why="""
    With zero.reduce, ranks round gradients to integers where they send them, and which numbers
    share a scale depends on the layout. So a plan is proven with exact sums; then it runs as it is,
    and each sum is compared with the exact one, number by number. Each rounding is off by half a
    step at most, the largest number of its block over 2 x 127 (int8) or 2 x 7 (int4), and a number
    is rounded once for each other rank of its node and once for each other node. What is off by
    more was not only rounded.
    """,
    bad="codes = round(x / scales.roll(1))               # the scale of another block",
    fixed="codes = round(x / scales)",
)

PROVE_REPAIRS_NOTHING = Rule(
    id="prove-repairs-nothing",
    why="""
    A proof runs a small plan in the place of yours: the same split of fewer blocks, heads,
    experts and tokens. A number that divides another in one of them must do so in both. If tensor
    ranks cannot split the heads of your plan, say, and can split those of the small plan, its proof
    would say nothing of yours. Such a plan breaks other rules first; this rule is for a plan that
    reaches a proof past them.
    """,
    bad="shrink(plan)                                    # 6 heads on 4 ranks become 8",
    fixed="require_nothing_mended(plan, shrink(plan))",
)

PROVE_SUBJECT = Rule(
    id="prove-subject",
    why="""
    The thing under proof is named as package.module:function, for every rank imports it by
    itself. The function takes the rank's context and a plan and returns a subject.
    """,
    bad="echelon.proof.prove(plan, subject='my_engine', ...)",
    fixed="echelon.proof.prove(plan, subject='my_engine.subject:build', ...)",
)

PROVE_INITIAL_WEIGHTS = Rule(
    id="prove-initial-weights",
    why="""
    One seed gives one model under every layout: the first value of an element is a function of
    (seed, parameter name, index in the whole parameter). No arithmetic depends on the layout, so
    the ranks must hold the very bits that one device holds.
    """,
    bad="torch.manual_seed(seed + rank); nn.init.normal_(local_weight)",
    fixed="initial_values(shape, spec, seed, offset=offset, into=part)",
)

PROVE_NOTHING_DROPPED = Rule(
    id="prove-nothing-dropped",
    why="""
    The ranks together hold every element of every parameter (each with one primary holder), run
    every block, and read every sample of the global batch once. Whatever is left out or done
    twice still trains, and trains something else.
    """,
    bad="rank r reads samples[0:b]                       # the same on every replica",
    fixed="rank r reads samples[(r * M + m) * b : (r * M + m + 1) * b]",
)

PROVE_TOKEN_COUNT = Rule(
    id="prove-token-count",
    why="""
    The loss has one denominator: the number of valid tokens of the global batch. Every rank must
    know it, whatever its own rows hold.
    """,
    bad="count = (labels != -100).sum()                  # of this rank's rows",
    fixed="count = all_reduce((labels != -100).sum())",
)

PROVE_ROUTES = Rule(
    id="prove-routes",
    why="""
    Every token of the global batch is routed once in every layer with experts, to the experts to
    which it goes on one device, and the same of them have no room for it: choices and drops depend
    on the token (and its sequence), never on which ranks share the work. In float64 they are equal,
    but where two scores are: either choice is right then. In the plan's own precision two experts
    can score next to the same. There, and nowhere else, ranks may choose the other one, and all
    that follows is compared with one device that does so too.
    """,
    bad="keep = index_on_this_rank < capacity            # of the tokens that this rank has",
    fixed="keep = index_in_the_whole_sequence < capacity",
)

PROVE_EXPERT_LOADS = Rule(
    id="prove-expert-loads",
    why="""
    Assignments by expert, dropped ones and the imbalance are counted over the whole global batch,
    before any drops, once for each token. Every rank of a pipeline stage knows those of its layers,
    all ranks their sum. A load that is counted twice, or on one rank only, moves biases and
    auxiliary losses.
    """,
    bad="counts = all_reduce(counts, tp)                 # of tokens that each of them routed",
    fixed="counts = all_reduce(counts, all ranks of the stage, each with its own tokens)",
)

PROVE_ROUTER_LOSSES = Rule(
    id="prove-router-losses",
    why="""
    The auxiliary loss and the z-loss are those of the global batch: the same coefficient, mean and
    scope under every layout. One that each rank computes from its own tokens and divides by its
    own count varies with the degrees; one that each tensor rank adds again is multiplied by them.
    """,
    bad="loss = cross_entropy + aux_loss_of_this_rank    # summed over tp ranks",
    fixed="loss = cross_entropy + sum over own tokens / tokens of the global batch",
)

PROVE_ROUTER_BIASES = Rule(
    id="prove-router-biases",
    why="""
    After a step the bias of each expert has moved against its load over the global batch, by
    bias_rate, on every rank alike, and a step that is skipped moves none. The shares of the loads,
    which the next auxiliary loss takes, follow in the same way. Ranks whose biases differ send
    tokens to different experts.
    """,
    bad="bias += rate * sign(mean(counts_here) - counts_here)",
    fixed="counts = all_reduce(counts); bias += rate * sign(mean(counts) - counts)",
)

PROVE_ACTIVATIONS = Rule(
    id="prove-activations",
    why="""
    What each block reads, what its norms, attention and MLP make of it, and what it gives, are
    those of one device for every token, on every rank that has the token, and again where a block
    is recomputed; so are the scores and gates of routers. The first that is not says between which
    two places the forward pass goes wrong. An engine that does not tell its activations is judged
    by its losses alone.
    """,
    bad="x = x + attention(x)                            # the norm before it was left out",
    fixed="x = x + attention(norm(x))",
)

PROVE_SYSTEMATIC_ERROR = Rule(
    id="prove-systematic-error",
    why="""
    In bfloat16 and float16 a single number is off by as much as a wrong factor of 1.01 would make
    it. Rounding errs to both sides, so over the thousands of elements of an activation or a
    gradient its mean is next to nothing; a factor stays. In each step each is fitted as what one
    device with the same weights has in this precision + c x the right one + rounding, and c must be
    0 to within six standard errors.
    """,
    bad="out = acc.to(torch.bfloat16) * bf16(1 / (1 - p))    # 1.1094 in place of 1.1111",
    fixed="out = (acc * (1 / (1 - p))).to(torch.bfloat16)",
)

PROVE_MICROBATCH_LOSS = Rule(
    id="prove-microbatch-loss",
    why="""
    The sum of token losses of each microbatch equals that of one device: the forward pass is the
    same function, on the right rows, with the right weights.
    """,
    bad="logits = x @ padded_head.T                      # padding ids take probability",
    fixed="logits[:, vocab:] = -inf",
)

PROVE_LOSS = Rule(
    id="prove-loss",
    why="""
    The loss that every rank reports is the sum over all valid tokens of the global batch divided
    by their number, never a mean of means: microbatches and replicas hold different counts.
    """,
    bad="loss = all_reduce(local_sum / local_count) / dp",
    fixed="loss = all_reduce(local_sum) / all_reduce(local_count)",
)

PROVE_LOSS_SCALE = Rule(
    id="prove-loss-scale",
    why="""
    All ranks multiply the loss by the same scale, and all skip a step in which the gradients of any
    rank overflow: nothing is updated and the scale follows. A rank that decides by what it sees
    itself updates its slices with the rest of the model left behind.
    """,
    bad="skip = not isfinite(squares of this rank's gradients)",
    fixed="skip = not isfinite(all_reduce(squares of this rank's gradients))",
)

PROVE_GRADIENTS = Rule(
    id="prove-gradients",
    why="""
    After reduction and before clipping, the gradient of every parameter equals that of the mean
    loss over the global batch on one device, on every rank that holds a copy.
    """,
    bad="all_reduce(grad) / dp                           # of a loss already divided by all tokens",
    fixed="all_reduce(grad)",
)

PROVE_SUM_DTYPE = Rule(
    id="prove-sum-dtype",
    why="""
    Where gradients are added up and reduced in float32, their elements have the digits of such
    sums: more than one product of a microbatch has, which is rounded to the parameters' dtype. A
    sum with fewer binary digits than one device's was rounded on its way, and what late
    microbatches or replicas add to it is lost in part.
    """,
    bad="all_reduce(main_grad.bfloat16())                # where float32 was asked for",
    fixed="all_reduce(main_grad)",
)

PROVE_ACTIVATION_GRADIENTS = Rule(
    id="prove-activation-gradients",
    why="""
    The gradient of the mean loss with respect to what passes between the parts of the model is
    that of one device for every token, on every rank that has the token. The block where it is
    right behind and wrong before is the one whose backward is wrong.
    """,
    bad="dx = dy @ weight_shard                          # of a column-parallel layer, not summed",
    fixed="dx = all_reduce(dy @ weight_shard, tp)",
)

PROVE_GRADIENT_NORM = Rule(
    id="prove-gradient-norm",
    why="""
    The gradient norm counts every parameter once: a split one over all its shards, a replicated
    one not once per holder, a tied one not once per stage. Clipping depends on it.
    """,
    bad="norm = clip_grad_norm_(this_stage.parameters(), 1.0)",
    fixed="norm = sqrt(all_reduce(sum of squares of what this rank counts))",
)

PROVE_CLIPPED_UPDATE = Rule(
    id="prove-clipped-update",
    why="""
    What the optimizer adds to each parameter in each step equals AdamW, SGD or Muon of the gradient
    clipped by the global norm. The proof uses an eps of the size of a gradient, so AdamW's update
    shows the gradient's size and not only its sign.
    """,
    bad="grad *= clip_norm / local_norm",
    fixed="grad *= min(1, clip_norm / global_norm)",
)

PROVE_REPLAYED_UPDATE = Rule(
    id="prove-replayed-update",
    why="""
    In the plan's own precision gradients are as rough as their dtype, and so is what one device
    would have made of its own. The optimizer is not: from the very gradients that the ranks hold,
    the formula gives the update to within the rounding of the master dtype.
    """,
    bad="grad_bf16 *= clip_norm / norm                   # rounds the gradient once more",
    fixed="grad = grad_bf16.float() * (clip_norm / norm)",
)

PROVE_MASTER_WEIGHTS = Rule(
    id="prove-master-weights",
    why="""
    Where the optimizer keeps a master copy, a parameter is its rounding and nothing else, bit for
    bit, on every rank, before the first step and after each. A parameter that is not written back,
    or gathered before it was, trains a model that the optimizer does not know of.
    """,
    bad="master -= update                                # and the next forward uses the old one",
    fixed="master -= update; parameter.copy_(master); all_gather(parameter)",
)

PROVE_PARAMETERS = Rule(
    id="prove-parameters",
    why="""
    After three optimizer steps every parameter equals that of one device: nothing that was kept
    between steps (moments, master copies, buffers) is stale, lost, or counted twice.
    """,
    bad="gradients of the last step are left in the bucket",
    fixed="the first microbatch of a step overwrites the bucket",
)

PROVE_REPLICAS = Rule(
    id="prove-replicas",
    why="""
    Ranks that hold copies of the same parameter hold the same bits after every step. Copies that
    differ by rounding drift apart without end, for nothing ever brings them together again.
    """,
    bad="each rank adds the summands in an order of its own",
    fixed="all_reduce, whose result is the same on every rank",
)

PROVE_OUTER_STEP = Rule(
    id="prove-outer-step",
    why="""
    Where islands of local SGD meet, the outer parameters take a step from the mean of what all
    islands moved away from them, each with the same weight (Douillard et al., "DiLoCo", 2023,
    algorithm 1). One process that trains the islands one after another takes the same step; outer
    parameters, and in float64 their momentum, must be the same.
    """,
    bad="momentum = zeros_like(parameters)             # in every round",
    fixed="momentum = outer_momentum * momentum + mean",
)

PROVE_ISLANDS_AGREE = Rule(
    id="prove-islands-agree",
    why="""
    Outer parameters and their momentum are what islands have in common: they have the same bits on
    all islands after every step. What differs by rounding would drift apart from round to round.
    """,
    bad="each island adds up what the others sent in the order in which it came",
    fixed="all_reduce, whose result is the same on every rank",
)

PROVE_RANGE = Rule(
    id="prove-range",
    why="""
    Numbers of usual size hide what a narrow dtype cannot hold. A plan in bfloat16 or float16 takes
    one step more with weights so large that scores lie far beyond where exp overflows, and one with
    weights so small that gradients nearly vanish. Wherever one device in that precision has finite
    numbers, the ranks must have them; what is not zero there must not vanish.
    """,
    bad="weights = scores.exp() / scores.exp().sum(-1)",
    fixed="weights = (scores - scores.max(-1)).exp()      # then divided by their sum",
)

PROVE_SCHEDULE_ORDER = Rule(
    id="prove-schedule-order",
    why="""
    The list of actions that was checked and simulated is the list that runs. An executor that
    takes another order may hold more activations than the plan says, or hang on another machine.
    """,
    bad="for m in range(M): forward(m)                   # under 1F1B",
    fixed="for action in schedule.actions[rank]: run(action)",
)

PROVE_BYTES_SENT = Rule(
    id="prove-bytes-sent",
    why="""
    The bytes that the formulas of `cost/` say each rank sends over each axis are the bytes that it
    sends, exactly: what a plan predicts is what is executed. A difference is a collective that is
    missing, doubled, over the wrong group or of the wrong size, even where the numbers come out
    right.
    """,
    bad="all_reduce(gradients)                           # in every microbatch",
    fixed="all_reduce(gradients)                           # in the last microbatch",
)

PROVE_BYTES_HELD = Rule(
    id="prove-bytes-held",
    why="""
    The bytes of parameters, gradients, master copies and optimizer state that the formulas of
    `cost/` say each rank holds are the bytes of the storages that are alive after a step, padding
    included. A difference is a buffer that was not freed, not sliced, or kept in another dtype.
    """,
    bad="whole = all_gather(slice)                       # and never freed",
    fixed="whole.untyped_storage().resize_(0)              # after the last use",
)

PROVE_INDEPENDENT = Rule(
    id="prove-independent",
    why="""
    One device and the ranks share the formulas of the model, its first values, the weights that
    decay, the rates and the batches: a mistake there is made by both, and no comparison of the two
    shows it. `prove --independent` compares the one device with a second implementation that is
    written from the papers and shares no function with it, in float64, and names the first part
    that differs: rotary positions, gates, weight decay, a label.
    """,
    bad="cos, sin = angles.cos(), angles.sin()           # theta ** (-pair / width)",
    fixed="cos, sin = angles.cos(), angles.sin()           # theta ** (-2 * pair / width)",
)

PROVE_INDEPENDENT_OPTIMIZER = Rule(
    id="prove-independent-optimizer",
    why="""
    An independent implementation is one that somebody has written. There is one of AdamW, SGD and
    Muon; that of an optimizer which a plugin brings would have to come from elsewhere.
    """,
    bad='optimizer.kind = "lion"                         # with prove --independent',
    fixed='optimizer.kind = "adamw"',
)


PROVE_TRAINER_AREA = Area("prove_trainer")
"""Rules that a proof of a whole run of the trainer can break."""

PROVE_TRAINER_STEPS = Rule(
    id="prove-trainer-steps",
    why="""
    The loop that trains reads its samples from prepared files, in an order that depends on the seed
    and the step only. A proof runs this very loop over a small text in which an epoch ends within a
    step, and compares loss, norm, rate and counts of every step with one device, which draws the
    samples by the definition of their order.
    """,
    bad="ids = permutation(epoch)[step * batch :]        # short at the end of an epoch",
    fixed="ids = sample_ids(seed=seed, step=step, ...)      # goes on with the next epoch",
)

PROVE_TRAINER_VALIDATION = Rule(
    id="prove-trainer-validation",
    why="""
    The validation loss is the mean over all held-out tokens, each counted once, with nothing
    dropped out: the number by which runs are compared. It must not depend on how ranks share the
    batches, the last of which is not full.
    """,
    bad="loss = mean(loss of each batch)                 # the last one is half empty",
    fixed="loss = sum of token losses / held-out tokens",
)

PROVE_TRAINER_RESUME = Rule(
    id="prove-trainer-resume",
    why="""
    A checkpoint holds all that the next step depends on: weights, optimizer state and its count,
    the loss scale, router biases, and where the samples stand. A run that is saved in the middle
    and resumed under another split takes the steps that the first one takes.
    """,
    bad="optimizer = AdamW(model.parameters())           # after a resume: its moments are zero",
    fixed="optimizer.load_state(checkpoint)",
)

PROVE_TRAINER_SCALE = Rule(
    id="prove-trainer-scale",
    why="""
    In the run's own precision the loss scale follows overflows: it halves after as many overflows
    as the hysteresis, and doubles after a window of steps without any, which also restores the
    hysteresis. The trainer takes a few steps in which gradients are made to overflow, is saved and
    resumed between them, and every step must have the scale of this rule.
    """,
    bad="if overflow: scale /= 2                         # and hysteresis_left stays at 0",
    fixed="if grown: hysteresis_left = hysteresis",
)

PROVE_TRAINER_CHECKPOINT = Rule(
    id="prove-trainer-checkpoint",
    why="""
    What is read from the last checkpoint on one device, whole tensors put together from the files
    of all ranks, is what one device has trained.
    """,
    bad="torch.save(model.state_dict(), path)            # of the slices of one rank",
    fixed="save_checkpoint(folder, snapshot, ...)          # each rank its own pieces, once",
)

PROVE_TRAINER_TEXT = Rule(
    id="prove-trainer-text",
    why="""
    The model that is read from a checkpoint writes the tokens that one device writes: the same
    likeliest token after each, with nothing dropped out, and with no look beyond the start of a
    document where documents are separate.
    """,
    bad="model(tokens)                                   # in training mode",
    fixed="echelon generate RUN",
)

PROVE_TRAINER_EXPORT = Rule(
    id="prove-trainer-export",
    why="""
    Weights that leave for another library must give the logits there that they give here. Families
    fuse or transpose matrices, and keep rotary pairs side by side or norms less one; adapters are
    merged into the weights of their layers, a few rows at a time. `prove --export` writes the
    trained weights in every format that the model has. transformers or the independent
    implementation reads each folder, and the proof names the first wrong tensor.
    """,
    bad="merged = weight + lora_b @ lora_a               # without alpha / rank",
    fixed="merged = weight + alpha / rank * (lora_b @ lora_a)",
)

PROVE_TRAINER_IMPORT = Rule(
    id="prove-trainer-import",
    why="""
    A run that starts from an export (`train.weights`) has the weights that were exported: each
    tensor, from every file of the folder, in the order of rows that the model here has.
    """,
    bad='query = stored["attention.wq"]                  # pairs side by side, as Meta turns them',
    fixed='query = halves(stored["attention.wq"])',
)

PROVE_DATA = Rule(
    id="prove-data",
    why="""
    A run trains on what its `[data]` says: each document in its place, answers of chats and nothing
    else if only they count, no held-out token in training, sources in their shares, phases of a
    mixture from their step on. The proof reads the first megabyte of each source from its records,
    by code that shares nothing with the trainer. It compares the rows of some steps and of
    validation.
    """,
    bad="labels = where(answers[:-1], tokens[1:], -100)    # the mask of the token before",
    fixed="labels = where(answers[1:], tokens[1:], -100)",
)


RACES_AREA = Area("races")
"""A proof with late completion: who may use memory when."""

PROVE_LATE_SUBJECT = Rule(
    id="prove-late-subject",
    why="""
    A proof with late completion gives the subject a third argument, the policy that makes its
    groups, pools, streams and stores (`parallel/completion/completion.py`). A subject that makes
    its own has operations that nobody can delay or watch, so nothing would be proven of them.
    """,
    bad="def build(place, plan): ...                     # proven with late=True",
    fixed="def build(place, plan, completion=None): ...",
)

PROVE_AWAITED = Rule(
    id="prove-awaited",
    why="""
    The result of an asynchronous operation is there when the operation has been awaited. Who reads
    it before, or never waits, reads whatever the transport has written so far: the right numbers on
    an idle machine, others on a busy one. Under late completion it is NaN until then, and the first
    operation that reads it is told.
    """,
    bad="pending = group.all_gather(whole, shard, name=name, async_op=True); use(whole)",
    fixed="pending = group.all_gather(whole, shard, name=name, async_op=True); pending.wait(); "
    "use(whole)",
)

PROVE_IN_FLIGHT = Rule(
    id="prove-in-flight",
    why="""
    What an operation reads stays as it is, and what it fills is nobody else's, until it has been
    awaited. A buffer that is reused too early sends the next thing in the place of this one, or
    both in part. Kernels, copies, communicators and threads of files are streams: two accesses of
    the same bytes need an event or a wait that orders them, which CPU ranks never miss. A vector
    clock of each stream finds the pair.
    """,
    bad="pending = group.send(x, 1, name=name, tag=0); x.mul_(2); pending.wait()",
    fixed="pending = group.send(x, 1, name=name, tag=0); pending.wait(); x.mul_(2)",
)

PROVE_FREED = Rule(
    id="prove-freed",
    why="""
    Memory is given back once, when no operation that reads or fills it is in flight and nobody uses
    it any more. Given back too early it belongs to two owners; given back twice it is lent to two.
    """,
    bad="pending = group.all_gather(whole, shard, name=name, async_op=True); memory.release()",
    fixed="pending = group.all_gather(whole, shard, name=name, async_op=True); pending.wait(); "
    "use(whole); memory.release()",
)

PROVE_LATE = Rule(
    id="prove-late",
    why="""
    When operations complete is no part of the mathematics: a run in which each of them completes
    only when somebody waits for it gives the same losses, gradients, norms and parameters as a run
    in which they complete as soon as they can, bit for bit.
    """,
    bad="if pending.done(): use_now() else: use_later()  # in another order of sums",
    fixed="pending.wait(); use()",
)
