%% Evaluates each line that it receives as Erlang, and answers with one line: figures that
%% a broker does not show over AMQP, without the two seconds that rabbitmqctl takes to start.
Serve = fun Serve(Socket) ->
    case gen_tcp:recv(Socket, 0) of
        {ok, Line} ->
            Answer = try
                {ok, Tokens, _} = erl_scan:string(binary_to_list(Line)),
                {ok, Expressions} = erl_parse:parse_exprs(Tokens),
                {value, Value, _} = erl_eval:exprs(Expressions, []),
                io_lib:format("~0tp~n", [Value])
            catch Class:Reason -> io_lib:format("~0tp~n", [{Class, Reason}])
            end,
            ok = gen_tcp:send(Socket, unicode:characters_to_binary(Answer)),
            Serve(Socket);
        {error, _} -> ok
    end
end.
Accept = fun Accept(Listener) ->
    {ok, Socket} = gen_tcp:accept(Listener),
    Server = spawn(fun() -> receive go -> Serve(Socket) end end),
    ok = gen_tcp:controlling_process(Socket, Server),
    Server ! go,
    Accept(Listener)
end.
Port = list_to_integer(os:getenv("HAPAX_CONSOLE_PORT")).
spawn(fun() ->
    Options = [binary, {packet, line}, {active, false}, {reuseaddr, true}, {ip, {127,0,0,1}},
        {buffer, 65536}],
    case gen_tcp:listen(Port, Options) of
        {ok, Listener} -> Accept(Listener);
        {error, Reason} ->
            io:format("console: port ~b: ~p~n", [Port, Reason]),
            erlang:halt(1)
    end
end).
